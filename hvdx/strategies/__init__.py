"""The ways to combine work, one a file; none of them knows Keras."""

from hvdx.strategies.all_reduce import AllReduce
from hvdx.strategies.base import Strategy, TensorSpec
from hvdx.strategies.registry import names, options, parse, resolve

__all__ = ["AllReduce", "Strategy", "TensorSpec", "names", "options", "parse", "resolve"]
