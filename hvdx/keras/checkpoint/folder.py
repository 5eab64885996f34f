"""A folder of checkpoints: written as a whole or not at all, by all ranks together.

    ckpt/epoch-0003/manifest.json   what the others hold
    ckpt/epoch-0003/shared.npz      what is alike on all ranks
    ckpt/epoch-0003/rank-0.npz      what belongs to rank 0; one a rank
    ckpt/.hvdx-...                  on its way in or out; what a killed job leaves is removed by the next

A checkpoint gets its name when it is complete, so whatever is called epoch-... can be trusted to be whole.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hvdx.comm import Comm
from hvdx.errors import ConfigError, HvdxError, ReplicaError
from hvdx.keras.lockstep import meet

T = TypeVar("T")

# Of the files, not of hvdx.
_FORMAT = 2
# How long a rank looks for what rank 0 has made: file systems of a network take a moment.
_PATIENCE_SECONDS = 2.0
_NAME = re.compile(r"epoch-(\d+)")
_AWAY = ".hvdx-"


class Folder:
    """Where the checkpoints of one training are.

    Args:
        path: the folder, which all ranks see; made if it is not there.
        comm: the ranks.
    """

    def __init__(self, path: str | os.PathLike[str], comm: Comm):
        self.path = Path(path)
        self._comm = comm

    def together(self, place: str, work: Callable[[], T], remedy: str) -> T:
        """Work that may fail on any rank, and then fails on all. Collective.

        Args:
            place: what is done, for people; alike on all ranks, which paths need not be.
            work: this rank's part; it exchanges nothing with a part of the ranks.
            remedy: what to do about a failure.

        Returns:
            What this rank's part returned.

        Raises:
            ReplicaError: on all ranks, with the ranks that failed and why; or the error itself, if all had the same.
        """
        problem, result = None, None
        try:
            result = work()
        except Exception as error:  # whatever it is, the others have to hear of it
            problem = error
        everyone = meet(self._comm, place, None if problem is None else _said(problem))
        failed = {rank: said for rank, said in enumerate(everyone) if said is not None}
        if not failed:
            return result  # type: ignore[return-value]
        if isinstance(problem, HvdxError) and len(failed) == self._comm.size and len(set(failed.values())) == 1:
            problem.collective = True
            raise problem
        listed = "; ".join(f"rank {rank}: {said}" for rank, said in failed.items())
        raise ReplicaError(f"{self.path}: {place}: {listed}. {remedy}") from problem

    # -- before anything is saved -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Make sure that every rank sees and can write the folder, and remove what a killed job left. Collective.

        Raises:
            ReplicaError: on all ranks, with those that cannot.
        """
        token = meet(self._comm, "the folder of checkpoints", uuid.uuid4().hex[:8])[0]
        probe = self.path / f"{_AWAY}probe-{token}"

        def make() -> None:
            if self._comm.rank == 0:
                self.path.mkdir(parents=True, exist_ok=True)
                self._tidy()
                probe.mkdir()

        place = "the folder of checkpoints"
        self.together(place, make, "Give a directory that can be written to.")
        try:
            self.together(place, lambda: self._write_probe(probe), "Give a directory that all hosts share.")
        finally:
            if self._comm.rank == 0:
                shutil.rmtree(probe, ignore_errors=True)

    def _write_probe(self, probe: Path) -> None:
        end = time.monotonic() + _PATIENCE_SECONDS
        while not probe.is_dir() and time.monotonic() < end:
            time.sleep(0.05)
        if not probe.is_dir():
            raise HvdxError(f"{self.path.resolve()} on {socket.gethostname()} is not the directory of rank 0")
        (probe / str(self._comm.rank)).write_text("")

    def _tidy(self) -> None:
        for left in self.path.glob(f"{_AWAY}*"):
            replaced = left.name.removeprefix(f"{_AWAY}replaced-")
            if _NAME.fullmatch(replaced) and not (self.path / replaced).exists():
                left.rename(self.path / replaced)
            else:
                shutil.rmtree(left, ignore_errors=True)

    def epochs(self) -> list[int]:
        """The epochs of the checkpoints, as rank 0 sees them. Collective."""
        return meet(self._comm, "the folder of checkpoints", self._listed() if self._comm.rank == 0 else None)[0]

    def _listed(self) -> list[int]:
        entries = self.path.iterdir() if self.path.is_dir() else ()
        found = (_NAME.fullmatch(entry.name) for entry in entries)
        return sorted(int(match[1]) for match in found if match)

    def at(self, epoch: int) -> Path:
        """The folder of one checkpoint."""
        return self.path / f"epoch-{epoch:04d}"

    # -- saving and reading -------------------------------------------------------------------------------------------

    def write(
        self,
        epoch: int,
        manifest: Mapping[str, Any],
        shared: Mapping[str, np.ndarray],
        own: Mapping[str, np.ndarray],
        keep: int,
    ) -> None:
        """Save one checkpoint. Collective.

        Args:
            epoch: what it is called.
            manifest: goes to the file of that name, from rank 0.
            shared: alike on all ranks; rank 0's are written.
            own: this rank's.
            keep: how many checkpoints may stay, this one included.

        Raises:
            ReplicaError: on all ranks, if one could not write; the checkpoints that were there still are.
        """
        place, rank = f"saving epoch {epoch}", self._comm.rank
        partial = self.path / f"{_AWAY}saving-{meet(self._comm, place, uuid.uuid4().hex[:8])[0]}"

        def write_own() -> None:
            partial.mkdir(parents=True, exist_ok=True)
            _write(partial / f"rank-{rank}.npz", lambda file: np.savez(file, **own))  # type: ignore[arg-type]
            if rank == 0:
                _write(partial / "shared.npz", lambda file: np.savez(file, **shared))  # type: ignore[arg-type]
                text = json.dumps({"format": _FORMAT, "ranks": self._comm.size, "epoch": epoch, **manifest}, indent=1)
                _write(partial / "manifest.json", lambda file: file.write(text.encode()))

        def publish() -> None:
            if rank == 0:
                missing = [r for r in range(self._comm.size) if not (partial / f"rank-{r}.npz").exists()]
                if missing:
                    raise HvdxError(f"what ranks {missing} wrote is not here. Give a directory that all hosts share")
                _sync_folder(partial)
                self._put(partial, self.at(epoch))
                self._remove(self._listed()[:-keep])

        remedy = "The checkpoints before it are as they were."
        try:
            self.together(place, write_own, remedy)
            self.together(place, publish, remedy)
        except HvdxError as error:
            # Only once all have failed: for a rank that failed alone, another might be giving it its name now.
            if error.collective:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _put(self, partial: Path, final: Path) -> None:
        replaced = self.path / f"{_AWAY}replaced-{final.name}"
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            # A job that is killed between these two lines finds it again: see _tidy.
            final.rename(replaced)
        partial.rename(final)
        _sync_folder(self.path)
        shutil.rmtree(replaced, ignore_errors=True)

    def _remove(self, epochs: Sequence[int]) -> None:
        for epoch in epochs:
            away = self.path / f"{_AWAY}removed-{uuid.uuid4().hex[:8]}"
            with contextlib.suppress(OSError):  # too many are no reason to stop
                self.at(epoch).rename(away)
            shutil.rmtree(away, ignore_errors=True)


class Saved:
    """A checkpoint that is there.

    Args:
        path: its folder.

    Attributes:
        manifest: what it holds.

    Raises:
        ConfigError: it was written by another version.
    """

    def __init__(self, path: Path):
        self.path = path
        self.manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
        if self.manifest.get("format") != _FORMAT:
            raise ConfigError(
                f"{path}: expected format {_FORMAT}, got {self.manifest.get('format')!r}. It was saved by another "
                "version of hvdx: use that one, or another directory."
            )

    def shared(self) -> "Arrays":
        """What is alike on all ranks."""
        return Arrays(np.load(self.path / "shared.npz", allow_pickle=False))

    def rank(self, rank: int) -> "Arrays":
        """What belonged to one rank."""
        return Arrays(np.load(self.path / f"rank-{rank}.npz", allow_pickle=False))


class Arrays(Mapping[str, np.ndarray]):
    """The arrays of one file, read one by one when they are asked for.

    Args:
        file: arrays by their names.
        prefix: only names that begin so; they are known by what follows.

    Example:
        >>> sorted(Arrays({"a.x": np.zeros(1), "a.y": np.ones(1), "b": np.ones(2)}, "a."))
        ['x', 'y']
    """

    def __init__(self, file: Mapping[str, np.ndarray], prefix: str = ""):
        self._file, self._prefix = file, prefix

    def part(self, prefix: str) -> "Arrays":
        """Those whose names begin with `prefix`."""
        return Arrays(self._file, f"{self._prefix}{prefix}")

    def __getitem__(self, name: str) -> np.ndarray:
        return self._file[f"{self._prefix}{name}"]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._file if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _write(path: Path, fill: Callable[[Any], Any]) -> None:
    with path.open("wb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """A name is on the disk only when its folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, HvdxError) else f"{type(error).__name__}: {error}"
