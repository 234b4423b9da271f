"""A module for each part of the campaign; each has a function `run`."""
