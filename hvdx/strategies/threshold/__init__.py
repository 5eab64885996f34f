"""Threshold: a worker sends the elements that reach a threshold, and keeps the rest in a residual."""

from hvdx.strategies.threshold.strategy import Threshold

__all__ = ["Threshold"]
