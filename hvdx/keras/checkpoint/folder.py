"""Folder with the checkpoints of one training.

    ckpt/epoch-0003/manifest.json         description of the other files
    ckpt/epoch-0003/shared.safetensors    variables with the same values on all ranks
    ckpt/epoch-0003/rank-0.safetensors    arrays of rank 0, and its parts of split layers; one file for each rank
    ckpt/epoch-0003-step-00000120/...     checkpoint after 120 steps of the fourth epoch
    ckpt/damaged-epoch-0002/...           checkpoint that was found damaged and renamed
    ckpt/.hvdx-owner                      job that saves here now, see `owner`
    ckpt/.hvdx-...                        temporary; the next job removes or renames those of a killed job

A checkpoint is written under a temporary name and renamed to epoch-... when it is complete.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

from hvdx import foreign
from hvdx.averaging.output import sync
from hvdx.comm import Comm
from hvdx.errors import CheckpointError, ConfigError, HvdxError, ReplicaError
from hvdx.keras.checkpoint import owner
from hvdx.keras.checkpoint.files import SEAL, Arrays, as_checkpoint_error, unsealed
from hvdx.keras.checkpoint.owner import Owner
from hvdx.keras.fit.positions import all_gather_at
from hvdx.log import Log

_log = Log(__name__)

T = TypeVar("T")

#: Version of the file format.
FORMAT = 4
#: Name of the file with the shared variables.
SHARED = "shared.safetensors"
# Least values of the numbers in a manifest; and the largest, since a resume skips that many batches one by one.
_COUNTS, _MOST = {"epoch": 0, "step": 0, "skip": 0, "ranks": 1}, 1 << 31
# Seconds to wait for a folder that rank 0 has made: a network file system may show it late.
_WAIT_SECONDS = 2.0
_NAME = re.compile(r"epoch-(\d+)(?:-step-(\d+))?")
_TEMPORARY = ".hvdx-"
# Number that Keras appends to names, as in dense_5/kernel. It counts the layers of a process, so ranks may differ.
_KERAS_NUMBER = re.compile(r"(?<=[a-z])_\d+(?=[/_ ,.;:')]|$)")
# Name of the place for `all_gather_at`.
_PLACE = "the folder of checkpoints"


def of_rank(rank: int) -> str:
    """Return the name of the file with the arrays of a rank."""
    return f"rank-{rank}.safetensors"


class Position(NamedTuple):
    """Position of a training.

    Attributes:
        epoch: number of complete epochs.
        step: number of steps that were taken in the following epoch.
    """

    epoch: int
    step: int = 0

    def __str__(self) -> str:
        return f"epoch {self.epoch}" if not self.step else f"step {self.step} of epoch {self.epoch + 1}"


class Failure(NamedTuple):
    """Failure of one rank.

    Attributes:
        text: error in one line.
        damaged: whether the checkpoint is damaged.
    """

    text: str
    damaged: bool


class Folder:
    """Folder with the checkpoints of one training.

    Args:
        path: path of the folder, which all ranks share; it need not exist yet.
        comm: the ranks.
    """

    def __init__(self, path: str, comm: Comm):
        self.path, self.comm = Path(path), comm
        self._owner: Owner | None = None

    def attempt(self, place: str, work: Callable[[], T]) -> tuple[T | None, Exception | None, dict[int, Failure]]:
        """Run work that may fail on any rank, and gather the failures. Collective.

        Args:
            place: name of the work for messages. It must be the same on all ranks, so it must not contain a path.
            work: this rank's part of the work. It must not exchange data with some of the ranks only.

        Returns:
            The result of this rank's part, the error that it raised, and the failure of each rank that failed.
        """
        problem, result = None, None
        try:
            result = work()
        except Exception as error:  # any error must reach the other ranks
            problem = error
        mine = None if problem is None else Failure(one_line(problem), isinstance(problem, CheckpointError))
        everyone = all_gather_at(self.comm, place, mine)
        return result, problem, {rank: failure for rank, failure in enumerate(everyone) if failure is not None}

    def on_all_ranks(self, place: str, work: Callable[[], T], remedy: str) -> T:
        """Run work that may fail on any rank; if it fails on one, raise an error on all. Collective.

        Args:
            place, work: as for `attempt`.
            remedy: advice for the error message.

        Returns:
            The result of this rank's part.

        Raises:
            ReplicaError: on all ranks, if some failed; the message lists them. If all raised the same `HvdxError`,
                that error is raised instead.
        """
        result, problem, failed = self.attempt(place, work)
        if failed:
            self.fail(place, problem, failed, remedy)
        return result  # type: ignore[return-value]

    def fail(self, place: str, problem: Exception | None, failed: Mapping[int, Failure], remedy: str) -> NoReturn:
        """Raise the error of `on_all_ranks` from the problem and failures that `attempt` returned."""
        same = len(failed) == self.comm.size and len({_KERAS_NUMBER.sub("", f.text) for f in failed.values()}) == 1
        if isinstance(problem, HvdxError) and same:
            raise problem.as_collective()
        listed = "; ".join(f"rank {rank}: {failure.text}" for rank, failure in failed.items())
        raise ReplicaError(f"{self.path}: {place}: {listed}. {remedy}") from problem

    def check(self) -> None:
        """Check that every rank can write to the folder, and own it until `release`. Collective.

        Temporary files of a killed job are removed.

        Raises:
            ConfigError: on all ranks, if another job is using the folder; the message names the job.
            ReplicaError: on all ranks, if some cannot write to the folder; the message lists them.
        """
        self._probe()
        self.own()
        if self.comm.rank == 0:
            self._tidy()

    def check_to_read(self) -> None:
        """Check that every rank can see the folder, by writing a small file to it. Collective.

        Temporary files of a killed job are removed, unless a job is saving there now.

        Raises:
            ReplicaError: on all ranks, if some cannot write to the folder; the message lists them.
        """
        self._probe()
        if self.comm.rank == 0 and not owner.holds(self.path):
            with contextlib.suppress(ConfigError, OSError):
                reader = Owner(self.path, wait=0.0)
                self._tidy()
                reader.release()

    def own(self) -> None:
        """Own the folder until `release`, so that no other job saves there. Collective.

        Raises:
            ConfigError: on all ranks, if another job is using the folder; the message names the job.
            ReplicaError: on all ranks, if rank 0 cannot write to the folder.
        """

        def take() -> str:
            if self.comm.rank == 0 and self._owner is None:
                self.path.mkdir(parents=True, exist_ok=True)
                try:
                    self._owner = Owner(self.path, owner.WAIT_SECONDS)
                except ConfigError as error:
                    return str(error)
            return ""

        taken = self.on_all_ranks(_PLACE, take, "Give a directory that can be written to.")
        refusal = all_gather_at(self.comm, _PLACE, taken)[0]
        if refusal:
            raise ConfigError.on_all_ranks(refusal)
        if self._owner is not None and not self._owner.locked:
            _log.warning(f"{self.path}: this file system has no locks: a second job that saves here is not detected.")

    def release(self) -> None:
        """Release the folder for other jobs."""
        if self._owner is not None:
            self._owner.release()
            self._owner = None

    def _probe(self) -> None:
        token = all_gather_at(self.comm, _PLACE, uuid.uuid4().hex[:8])[0]
        probe = self.path / f"{_TEMPORARY}probe-{token}"

        def make() -> None:
            if self.comm.rank == 0:
                self.path.mkdir(parents=True, exist_ok=True)
                probe.mkdir()

        self.on_all_ranks(_PLACE, make, "Give a directory that can be written to.")
        try:
            self.on_all_ranks(_PLACE, lambda: self._write_probe(probe), "Give a directory that all hosts share.")
        finally:
            if self.comm.rank == 0:
                shutil.rmtree(probe, ignore_errors=True)

    def _write_probe(self, probe: Path) -> None:
        end = time.monotonic() + _WAIT_SECONDS
        while not probe.is_dir() and time.monotonic() < end:
            time.sleep(0.05)
        if not probe.is_dir():
            raise HvdxError(f"{self.path.resolve()} on {socket.gethostname()} is not the directory of rank 0")
        (probe / str(self.comm.rank)).write_text("")

    def _tidy(self) -> None:
        for left in self.path.glob(f"{_TEMPORARY}*"):
            if left.name == owner.NAME:
                continue
            replaced = left.name.removeprefix(f"{_TEMPORARY}replaced-")
            if _NAME.fullmatch(replaced) and not (self.path / replaced).exists():
                left.rename(self.path / replaced)
            else:
                shutil.rmtree(left, ignore_errors=True)

    # -- the checkpoints ----------------------------------------------------------------------------------------------

    def positions(self) -> list[Position]:
        """Return the positions of the checkpoints that rank 0 sees, the newest last. Collective."""
        return all_gather_at(self.comm, _PLACE, self._listed() if self.comm.rank == 0 else None)[0]

    def _listed(self) -> list[Position]:
        return positions_in(self.path)

    def at(self, position: Position) -> Path:
        """Return the path of a checkpoint."""
        return self.path / name_of(position)

    def partial(self, token: str) -> Path:
        """Return the temporary path of a checkpoint that is being written."""
        return self.path / f"{_TEMPORARY}saving-{token}"

    def publish(self, partial: Path, position: Position, keep: int) -> None:
        """Give a complete checkpoint its name, and remove surplus checkpoints. On rank 0 alone.

        Checkpoints at later positions are removed: they are older, and were made by another number of ranks, with steps
        of another size.

        Args:
            partial: temporary path of the checkpoint.
            position: position of the checkpoint.
            keep: number of checkpoints to keep, this one included.

        Raises:
            OSError: if the checkpoint was not published; the existing checkpoints are unchanged.
        """
        sync(partial)
        final = self.at(position)
        replaced = self.path / f"{_TEMPORARY}replaced-{final.name}"
        taken = final.exists()
        if taken:
            shutil.rmtree(replaced, ignore_errors=True)
            # If the job is killed before the next rename, `_tidy` of the next job restores this name.
            final.rename(replaced)
        try:
            partial.rename(final)
            sync(self.path)
        except OSError:
            if final.exists():
                final.rename(partial)
            if taken:
                replaced.rename(final)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
        present = self._listed()
        self._remove([p for p in present if p > position])
        self._remove([p for p in present if p <= position][:-keep])

    def _remove(self, positions: Sequence[Position]) -> None:
        for position in positions:
            away = self.path / f"{_TEMPORARY}removed-{uuid.uuid4().hex[:8]}"
            with contextlib.suppress(OSError):  # surplus checkpoints do no harm
                self.at(position).rename(away)
            shutil.rmtree(away, ignore_errors=True)

    def set_aside(self, position: Position) -> None:
        """Rename a damaged checkpoint, so that its name can be used again. On rank 0 alone."""
        name = f"damaged-{self.at(position).name}"
        free = next(n for n in (name, *(f"{name}-{i}" for i in range(2, 1000))) if not (self.path / n).exists())
        self.at(position).rename(self.path / free)


def name_of(position: Position) -> str:
    """Return the name of the checkpoint at a position.

    Example:
        >>> name_of(Position(3)), name_of(Position(3, 120))
        ('epoch-0003', 'epoch-0003-step-00000120')
    """
    step = f"-step-{position.step:08d}" if position.step else ""
    return f"epoch-{position.epoch:04d}{step}"


def positions_in(path: str | os.PathLike[str]) -> list[Position]:
    """Return the positions of the checkpoints that this rank sees in a folder, the newest last."""
    entries = os.listdir(path) if os.path.isdir(path) else ()
    found = (_NAME.fullmatch(entry) for entry in entries)
    return sorted(Position(int(match[1]), int(match[2] or 0)) for match in found if match)


class Saved:
    """Checkpoint in a folder.

    Args:
        path: path of the checkpoint.

    Attributes:
        manifest: content of its manifest.json, without the checksum.

    Raises:
        CheckpointError: if the manifest is damaged, or is that of another checkpoint.
        ConfigError: if another version of hvdx wrote the checkpoint in another format.
    """

    def __init__(self, path: Path):
        self.path = path
        with as_checkpoint_error(path / "manifest.json"):
            text = foreign.read(path / "manifest.json").decode()
            content = dict(json.loads(text))
            # Formats 1 to 3 had no checksum.
            self.manifest = content if content.get("format") in (1, 2, 3) and SEAL not in content else unsealed(text)
        if self.manifest.get("format") != FORMAT:
            raise ConfigError(
                f"{path}: expected format {FORMAT}, got {self.manifest.get('format')!r}. It was saved by another "
                "version of hvdx: use that one, or another directory."
            )
        with as_checkpoint_error(path / "manifest.json"):
            for name, least in _COUNTS.items():
                value = self.manifest.get(name)
                value = least if value is None else value
                if type(value) is not int or not least <= value <= _MOST:
                    raise ValueError(f"{name}: expected a whole number from {least} to {_MOST}, got {value!r}")
            found = name_of(Position(self.manifest["epoch"], self.manifest["step"]))
        if found != path.name:
            raise CheckpointError(f"manifest.json is that of {found}")
        self._files: dict[str, Arrays] = {}

    def shared(self) -> Arrays:
        """Return the shared arrays."""
        return self._of(SHARED)

    def rank(self, rank: int) -> Arrays:
        """Return the arrays of one rank."""
        return self._of(of_rank(rank))

    def _of(self, name: str) -> Arrays:
        if name not in self._files:
            self._files[name] = Arrays.of(self.path / name)
        return self._files[name]


def one_line(error: Exception) -> str:
    """Format an error in one line, for other ranks."""
    return str(error) if isinstance(error, HvdxError) else f"{type(error).__name__}: {error}"
