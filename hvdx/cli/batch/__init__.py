"""Batch systems: the scripts of `hvdx job`, and the test jobs of `hvdx doctor --batch`."""
