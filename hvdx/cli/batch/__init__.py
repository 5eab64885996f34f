"""Batch systems: the scripts of `hvdx job`, and the jobs that `hvdx doctor --batch` tries."""
