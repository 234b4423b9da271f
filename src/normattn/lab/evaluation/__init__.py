"""The protocols: token accuracy and loss of any tokens-to-scores callable, as measurements."""
