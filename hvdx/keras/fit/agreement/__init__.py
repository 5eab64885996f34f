"""Comparison of what must be alike on all ranks, or must differ: data, orders, vocabularies, models, constants."""
