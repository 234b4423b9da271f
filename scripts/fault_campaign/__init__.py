"""Trials of every promise about faults, run by `scripts/faults`."""
