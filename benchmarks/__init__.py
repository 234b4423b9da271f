"""normattn beside other libraries: `python -m benchmarks --help`. Not part of the wheel."""
