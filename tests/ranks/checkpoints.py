"""Checkpoints rewritten for another number of ranks."""

from hvdx import comm as world
from hvdx.keras.checkpoint import files
from hvdx.keras.checkpoint.folder import of_rank


def rewrite(path, arrays):
    """Overwrite a file of arrays."""
    files.write({path: lambda file: files.write_arrays(file, arrays)})


def of_other_ranks(path, ranks, change=lambda rank, arrays: arrays):
    """Rewrite a checkpoint for another number of ranks. Collective.

    Args:
        path: of the checkpoint.
        ranks: number of ranks of the new checkpoint.
        change: (rank r, arrays of rank r mod N) -> arrays of rank r.

    Returns:
        The manifest before the change, and the new arrays of each rank.
    """
    comm = world.start()
    manifest = files.unsealed((path / "manifest.json").read_text())
    found = [dict(files.Arrays.of(path / of_rank(rank % manifest["ranks"]))) for rank in range(ranks)]
    held = [change(rank, arrays) for rank, arrays in enumerate(found)]
    comm.all_gather_object(None, "all have read it")
    if comm.rank == 0:
        samples = manifest["samples"] and manifest["samples"] * ranks // manifest["ranks"]
        changed = manifest | {"ranks": ranks, "samples": samples, "steps": None}
        (path / "manifest.json").write_text(files.sealed(changed))
        for rank, arrays in enumerate(held):
            rewrite(path / of_rank(rank), arrays)
    comm.all_gather_object(None, "all can read it")
    return manifest, held
