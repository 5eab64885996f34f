"""Benchmarks. `python jobs/benchmarks/NAME.py` runs one; docs/benchmarks holds the recorded figures."""
