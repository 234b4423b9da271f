"""Measure against peers: interleaved ratios, goals as data, records that keep their provenance.

`runner.run_bench` does it all. This file imports nothing: processes whose memory is measured load
only what they need.
"""
