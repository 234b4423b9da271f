"""One file per part of a score: the file is named after the idea, and registers itself."""
