"""Benchmarks: each is run as `python jobs/benchmarks/NAME.py`; docs/benchmarks/NAME.json holds its figures."""
