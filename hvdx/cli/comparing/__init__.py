"""Comparisons of strategies: the plan, the start of a run, and the runs one after the other."""
