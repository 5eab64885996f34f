"""Detection of NaN and infinity in the weights, with the rank, step and gradient where they first occurred."""

from collections.abc import Sequence

import tensorflow as tf

from hvdx.comm import Comm
from hvdx.errors import ReplicaError
from hvdx.keras.adapters.first_bad import bad_flags
from hvdx.keras.types import Variable
from hvdx.log import Log

_log = Log(__name__)


def are_bad(weights: Sequence[Variable]) -> list[bool]:
    """Return for each of some weights whether it holds NaN or infinity."""
    flags = bad_flags([tf.convert_to_tensor(v) for v in weights]).numpy() if weights else []
    return [bool(flag) for flag in flags]


def check(
    weights: Sequence[Variable], firsts: Sequence[tuple[int, str]], comm: Comm, when: str, terminates: bool = False
) -> bool:
    """Stop if weights hold NaN or infinity; print a warning if only a gradient held them. Collective.

    Args:
        weights: trainable Keras variables.
        firsts: for each optimiser, the step in which a gradient of this rank first held NaN or infinity (0 if none),
            and the name of the gradient's variable.
        comm: the ranks.
        when: time of the check for the message, such as "after epoch 3".
        terminates: only print a warning, because a `TerminateOnNaN` of the script stops the fit.

    Returns:
        Whether weights hold NaN or infinity, on any rank.

    Raises:
        ReplicaError: on every rank, if weights of a rank hold NaN or infinity.
    """
    bad_here = are_bad(weights)
    mine = (
        next((v.path for v, bad in zip(weights, bad_here, strict=True) if bad), ""),
        min((first for first in firsts if first[0]), default=(0, "")),
    )
    everyone = comm.all_gather_object(mine, "NaN in the weights")
    began = sorted((step, rank, name) for rank, (_, (step, name)) in enumerate(everyone) if step)
    source = ""
    if began:
        first = [(rank, name) for step, rank, name in began if step == began[0][0]]
        ranks = ", ".join(str(rank) for rank, _ in first)
        source = (
            f"It began in step {began[0][0]} of this fit on rank{'s' * (len(first) > 1)} {ranks}, in the gradient of "
            f"{first[0][1]}"
        )
    bad = [rank for rank, (name, _) in enumerate(everyone) if name]
    if bad:
        which = "all ranks" if len(bad) == comm.size else f"rank{'s' * (len(bad) > 1)} {', '.join(map(str, bad))}"
        text = (
            f"the weights hold NaN or infinity {when}: {everyone[bad[0]][0]} on {which}. "
            + (f"{source}: check the input of that rank. " if source else "")
            + "If no input holds NaN or infinity, lower the learning rate or clip the gradients. "
        )
        if not terminates:
            raise ReplicaError(f"{text}Training was stopped; no checkpoint of these weights should be used.")
        if comm.rank == 0:
            _log.warning(f"{text}No checkpoint of these weights should be used.", head="hvdx: warning: ")
        return True
    if source and comm.rank == 0:
        _log.warning(
            f"a gradient held NaN or infinity. {source}; the weights are finite {when}.", head="hvdx: warning: "
        )
    return False
