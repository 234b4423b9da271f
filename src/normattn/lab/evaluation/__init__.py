"""Evaluation protocols: accuracy, loss and other metrics as measurements by document."""
