"""What a run cost: counters and tables."""
