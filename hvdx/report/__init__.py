"""Costs of a run: counters and tables."""
