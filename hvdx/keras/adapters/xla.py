"""A check for XLA, which cannot compile communication between ranks."""

from hvdx.errors import ConfigError
from hvdx.keras.seams.graphs import traces_for_xla


def refuse() -> None:
    """Raise if the function that is being traced is for XLA.

    Raises:
        ConfigError: if it is; the message says how to turn XLA off.

    Example:
        >>> refuse()
    """
    if traces_for_xla():
        raise ConfigError(
            "jit_compile: expected False where gradients are combined over ranks, got True: XLA cannot compile "
            "communication between ranks. Do: move @tf.function(jit_compile=True) from a train_step to the part of it "
            "that computes the gradients; or model.compile(..., jit_compile=False); or add the callback Distribute or "
            "BroadcastGlobalVariablesCallback, which turn the option of compile off."
        )
