"""The command line: thin, and quick to start because heavy imports wait until a command runs."""
