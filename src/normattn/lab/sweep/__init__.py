"""How a study is run: a plan, runs in child processes, progress, and going on after a stop."""
