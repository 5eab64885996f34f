"""Checkpoints that are turned into those of other ranks."""

import json

from hvdx import comm as world
from hvdx.keras.checkpoint import files
from hvdx.keras.checkpoint.folder import of_rank


def rewrite(path, arrays):
    """Write a file of arrays anew."""
    files.write({path: lambda file: files.write_arrays(file, arrays)})


def of_other_ranks(path, ranks, change=lambda rank, arrays: arrays):
    """Turn a checkpoint into one that so many ranks made. Collective.

    Args:
        path: of the checkpoint.
        ranks: how many.
        change: what rank r has in place of what rank r mod N had.

    Returns:
        The manifest as it was, and what each of the ranks has.
    """
    comm = world.start()
    manifest = json.loads((path / "manifest.json").read_text())
    found = [dict(files.Arrays.of(path / of_rank(rank % manifest["ranks"]))) for rank in range(ranks)]
    held = [change(rank, arrays) for rank, arrays in enumerate(found)]
    comm.all_gather_object(None, "all have read it")
    if comm.rank == 0:
        samples = manifest["samples"] and manifest["samples"] * ranks // manifest["ranks"]
        (path / "manifest.json").write_text(json.dumps(manifest | {"ranks": ranks, "samples": samples, "steps": None}))
        for rank, arrays in enumerate(held):
            rewrite(path / of_rank(rank), arrays)
    comm.all_gather_object(None, "all can read it")
    return manifest, held
