"""Loops over elements: installed as `hvdx.kernels`; may import numpy and numba, nothing of hvdx."""
