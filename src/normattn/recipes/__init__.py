"""Whole experiments as data: what to train, how to measure it, and a scheduler."""
