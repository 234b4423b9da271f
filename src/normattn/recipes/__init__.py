"""Whole experiments as data: which cells to train, how to measure them, and a scheduler for both."""
