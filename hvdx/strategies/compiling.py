"""Compilation of a codec's kernels on all ranks, reported once by rank 0."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hvdx.comm import Comm, progress
from hvdx.log import Log

if TYPE_CHECKING:
    from hvdx.codec.base import Codec, S

_log = Log(__name__)


def prepare_together(codec: "Codec[S]", comm: Comm, what: str) -> None:
    """Load or compile a codec's kernels on all ranks. Collective.

    Args:
        codec: codec, the same on all ranks.
        comm: the ranks.
        what: owner of the kernels, for messages.
    """
    missing = sum(comm.all_gather_object(not codec.prepared, f"the kernels of {what}"))
    if missing and comm.rank == 0:
        announce(codec, what, f" on {missing} of {comm.size} ranks" if comm.size > 1 else "")
    with progress.compiling(f"the kernels of {what}"), _new_garbage_only():
        why = codec.prepare()
    reasons = comm.all_gather_object(why, f"the kernels of {what}")
    if any(reasons) and comm.rank == 0:
        rank, reason = next((r, text) for r, text in enumerate(reasons) if text)
        _log.warning(
            f"rank {rank} cannot keep the compiled kernels, so each process compiles them again: {reason}. "
            "Set HVDX_CACHE to a folder of your own."
        )


@contextmanager
def _new_garbage_only() -> Iterator[None]:
    """Let collections of garbage visit only objects that are made meanwhile.

    Loading kernels makes enough objects for a collection of all, and those of TensorFlow take half of its time.
    """
    if gc.get_freeze_count():
        yield  # the script has objects that are to stay so
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def announce(codec: "Codec[S]", what: str, where: str = "") -> None:
    """Print that kernels are about to be compiled.

    Args:
        codec: codec of the kernels.
        what: owner of the kernels.
        where: text to add after `what`, such as " on 2 of 4 ranks".
    """
    _log.info(
        f"compiling the kernels of {what}{where}: about {codec.compile_seconds} s of an idle core, once on each "
        "machine (`hvdx build-kernels` does it beforehand)"
    )
