"""normattn: the attention score as a value that you can specify."""
