"""Supervision of a launcher: one attempt, what ended it, and the restarts after the last checkpoint."""
