"""Loops over elements, installed as `hvdx.kernels`. They import NumPy and Numba, but nothing of hvdx."""
