"""Costs of runs: counters, records, and reports of them."""
