"""What each command can be told, a file a command; quick to import, for `--help` reads them all."""
