"""Atomic output: a result gets its name once it is complete."""

import glob
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from hvdx.errors import AverageError


def check_free(out: Path, force: bool, inputs: Sequence[Path] = ()) -> None:
    """Reject an output path that exists already.

    Args:
        out: file, directory, or prefix of several files.
        force: permission to replace a file, or a directory that is a SavedModel.
        inputs: networks that are read; a directory that holds one of them is never replaced.

    Raises:
        AverageError: if `out` exists and may not be replaced, or if its folder does not exist.
    """
    if out.name in ("", ".."):
        raise AverageError(f"{out}: expected the name of the result, got a folder. Add a name, as in {out / 'mean'}.")
    if out.is_dir() and force:
        inside = next((path for path in inputs if out.resolve() in path.resolve().parents), None)
        if inside is not None:
            raise AverageError(f"{out}: it holds the input {inside}, and is kept. Name another output.")
        if not (out / "saved_model.pb").is_file():
            raise AverageError(
                f"{out}: it is a directory but not a SavedModel, and is kept. Name another output, or remove it first."
            )
    if not out.parent.is_dir():
        raise AverageError(f"{out}: the folder {out.parent} does not exist. Make it first.")
    there = pieces(out)
    if there and not force:
        raise AverageError(
            f"{there[0]}: it exists, and is kept. Replace it with --force (force=True), or name another."
        )


def pieces(out: Path) -> list[Path]:
    """Return the existing paths of a result: `out`, and the files of a TensorFlow checkpoint with that prefix."""
    found = [out] if out.exists() or out.is_symlink() else []
    if (out.parent / f"{out.name}.index").exists():
        found += sorted(
            p for p in out.parent.glob(f"{glob.escape(out.name)}.*") if p.suffix == ".index" or ".data-" in p.name
        )
    return found


def write_whole(out: Path, needed: int, force: bool, write: Callable[[Path], None]) -> None:
    """Write a result under a temporary name in the same folder, and rename it when it is complete.

    Args:
        out: path of the result.
        needed: size of the result, in bytes.
        force: permission to replace existing files.
        write: function that writes the result to the path that it gets, or to several paths that begin with this path
            and a dot.

    Raises:
        AverageError: if there is too little space, or writing fails; existing files then stay unchanged.
    """
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise AverageError(
            f"{out}: expected {needed / 1e9:.2f} GB of free space for it, found {free / 1e9:.2f}. Make room, or write "
            "it elsewhere."
        )
    partial = out.parent / f".hvdx-{uuid.uuid4().hex[:8]}-{out.name}"
    try:
        write(partial)
        written = _written(partial)
        for path in written:
            sync(path)
        # Averaging may take long, and another process may have created `out` in the meantime.
        check_free(out, force)
        _publish(partial, written, out)
    except OSError as error:
        raise AverageError(
            f"{out}: {error.strerror or error}. It was not written; make room, or write it elsewhere."
        ) from error
    finally:
        for path in _written(partial):
            _remove(path)


def _written(partial: Path) -> list[Path]:
    found = [partial] if partial.exists() else []
    return found + sorted(partial.parent.glob(f"{glob.escape(partial.name)}.*"))


def _publish(partial: Path, written: list[Path], out: Path) -> None:
    before = pieces(out)
    # One rename can replace a file, but not a folder or the several files of a checkpoint.
    if before == [out] and written == [partial] and not (out.is_dir() or partial.is_dir()):
        os.replace(partial, out)
    else:
        aside = [(path, path.with_name(f".hvdx-replaced-{uuid.uuid4().hex[:8]}-{path.name}")) for path in before]
        # The index comes last, since files without an index are not a checkpoint.
        ordered = sorted(written, key=lambda path: path.suffix == ".index")
        new = [(path, out.with_name(out.name + path.name.removeprefix(partial.name))) for path in ordered]
        _rename_all([*aside, *new])
        for _, away in aside:
            _remove(away)
    sync(out.parent)


def _rename_all(moves: list[tuple[Path, Path]]) -> None:
    """Rename all paths, or none: if one fails, undo the others."""
    done: list[tuple[Path, Path]] = []
    try:
        for old, new in moves:
            old.rename(new)
            done.append((old, new))
    except OSError:
        for old, new in reversed(done):
            new.rename(old)
        raise


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
