"""A check for XLA, which cannot compile communication between ranks."""

from typing import Any

import tensorflow as tf

from hvdx.errors import ConfigError


def refuse() -> None:
    """Raise if the function that is being traced is for XLA.

    Raises:
        ConfigError: if it is; the message says how to turn XLA off.

    Example:
        >>> refuse()
    """
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                raise ConfigError(
                    "jit_compile: expected False where gradients are combined over ranks, got True: XLA cannot compile "
                    "communication between ranks. Do: model.compile(..., jit_compile=False), or add the callback "
                    "Distribute or BroadcastGlobalVariablesCallback, which turn it off."
                )
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
