"""Comparisons with other libraries: `python -m benchmarks --help`. Not part of the wheel."""
