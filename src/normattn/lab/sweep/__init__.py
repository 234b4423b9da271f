"""How a study is run: a plan, cells in child processes, progress, and going on after a stop."""
