"""Exclusion of hvdx from AutoGraph, which rewrites Python functions that a `tf.function` calls."""

import importlib
from typing import Any


def exclude() -> None:
    """Make AutoGraph call the functions of hvdx as they are.

    They have no Python conditions on tensors. For each function, a conversion writes a file to the temporary folder,
    which stays there if the process is killed, and it warns about compiled modules such as mpi4py.
    """
    # TensorFlow has a public way for single functions only (`do_not_convert`).
    config: Any = importlib.import_module("tensorflow.python.autograph.core.config")
    rules = config.Convert("hvdx.jobs"), config.DoNotConvert("hvdx"), config.DoNotConvert("mpi4py")
    config.CONVERSION_RULES = (*rules, *config.CONVERSION_RULES)
