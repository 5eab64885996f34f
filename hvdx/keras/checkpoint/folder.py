"""A folder of checkpoints: which there are, and which of them are whole.

    ckpt/epoch-0003/manifest.json         what the others hold
    ckpt/epoch-0003/shared.safetensors    what is alike on all ranks
    ckpt/epoch-0003/rank-0.safetensors    what belongs to rank 0; one a rank
    ckpt/epoch-0003-step-00000120/...     after 120 steps of the fourth epoch
    ckpt/damaged-epoch-0002/...           found damaged, and set aside
    ckpt/.hvdx-owner                      which job saves here now, see `owner`
    ckpt/.hvdx-...                        on its way in or out; what a killed job leaves is removed by the next

A checkpoint gets its name when it is complete, so whatever is called epoch-... was whole when it got it.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from hvdx.averaging.output import sync
from hvdx.comm import Comm
from hvdx.errors import CheckpointError, ConfigError, HvdxError, ReplicaError
from hvdx.keras.checkpoint import owner
from hvdx.keras.checkpoint.files import Arrays, whole
from hvdx.keras.checkpoint.owner import Owner
from hvdx.keras.fit.sync_callback import all_gather_at

T = TypeVar("T")

#: Of the files, not of hvdx.
FORMAT = 3
#: The file of what is alike on all ranks.
SHARED = "shared.safetensors"
# How long a rank looks for what rank 0 has made: file systems of a network take a moment.
_PATIENCE_SECONDS = 2.0
_NAME = re.compile(r"epoch-(\d+)(?:-step-(\d+))?")
_AWAY = ".hvdx-"
# Keras counts the names of layers in each process, and a rank may have made more of them: dense_5/kernel.
_KERAS_NUMBER = re.compile(r"(?<=[a-z])_\d+(?=[/_ ,.;:')]|$)")
# What is said of where a rank is.
_PLACE = "the folder of checkpoints"
# What a manifest of this format says.
_KEYS = (
    *("ranks", "epoch", "step", "drawn", "skip", "steps", "share", "samples"),
    *("weights", "optimizer", "own", "optimizers"),
)


def of_rank(rank: int) -> str:
    """The file of what belongs to a rank."""
    return f"rank-{rank}.safetensors"


class Position(NamedTuple):
    """How far a training has come.

    Attributes:
        epoch: whole epochs.
        step: steps of the next one.
    """

    epoch: int
    step: int = 0

    def __str__(self) -> str:
        return f"epoch {self.epoch}" if not self.step else f"step {self.step} of epoch {self.epoch + 1}"


class Failure(NamedTuple):
    """What went wrong on a rank.

    Attributes:
        text: for people.
        damaged: whether it is the checkpoint's fault.
    """

    text: str
    damaged: bool


class Folder:
    """Where the checkpoints of one training are.

    Args:
        path: the folder, which all ranks see; made if it is not there.
        comm: the ranks.
    """

    def __init__(self, path: str, comm: Comm):
        self.path, self.comm = Path(path), comm
        self._owner: Owner | None = None

    def attempt(self, place: str, work: Callable[[], T]) -> tuple[T | None, Exception | None, dict[int, Failure]]:
        """Work that may fail on any rank. Collective.

        Args:
            place: what is done, for people; alike on all ranks, which paths need not be.
            work: this rank's part; it exchanges nothing with a part of the ranks.

        Returns:
            What this rank's part returned, the error it raised, and what went wrong on which rank.
        """
        problem, result = None, None
        try:
            result = work()
        except Exception as error:  # whatever it is, the others have to hear of it
            problem = error
        mine = None if problem is None else Failure(one_line(problem), isinstance(problem, CheckpointError))
        everyone = all_gather_at(self.comm, place, mine)
        return result, problem, {rank: failure for rank, failure in enumerate(everyone) if failure is not None}

    def on_all_ranks(self, place: str, work: Callable[[], T], remedy: str) -> T:
        """Work that may fail on any rank, and then fails on all. Collective.

        Args:
            place, work: see `attempt`.
            remedy: what to do about a failure.

        Returns:
            What this rank's part returned.

        Raises:
            ReplicaError: on all ranks, with the ranks that failed and why; or the error itself, if all had the same.
        """
        result, problem, failed = self.attempt(place, work)
        if failed:
            self.fail(place, problem, failed, remedy)
        return result  # type: ignore[return-value]

    def fail(self, place: str, problem: Exception | None, failed: Mapping[int, Failure], remedy: str) -> NoReturn:
        """Raise what `on_all_ranks` raises, for what `attempt` returned."""
        alike = len(failed) == self.comm.size and len({_KERAS_NUMBER.sub("", f.text) for f in failed.values()}) == 1
        if isinstance(problem, HvdxError) and alike:
            problem.collective = True
            raise problem
        listed = "; ".join(f"rank {rank}: {failure.text}" for rank, failure in failed.items())
        raise ReplicaError(f"{self.path}: {place}: {listed}. {remedy}") from problem

    def check(self) -> None:
        """Make sure that every rank sees and can write the folder, and have it for this job alone. Collective.

        What a killed job left is removed. `release` gives the folder back.

        Raises:
            ConfigError: on all ranks, with the job that is using it.
            ReplicaError: on all ranks, with those that cannot.
        """
        self._probe()
        self.own()
        if self.comm.rank == 0:
            self._tidy()

    def check_to_read(self) -> None:
        """Make sure that every rank sees and can write the folder. Collective.

        What a killed job left is removed, unless a job is saving there now.

        Raises:
            ReplicaError: on all ranks, with those that cannot.
        """
        self._probe()
        if self.comm.rank == 0 and not owner.holds(self.path):
            with contextlib.suppress(ConfigError, OSError):
                reader = Owner(self.path, patience=0.0)
                self._tidy()
                reader.release()

    def own(self) -> None:
        """Have the folder for this job alone, until `release`. Collective.

        Raises:
            ConfigError: on all ranks, with the job that is using it.
            ReplicaError: on all ranks, where rank 0 cannot write there.
        """

        def take() -> str:
            if self.comm.rank == 0:
                self.path.mkdir(parents=True, exist_ok=True)
                try:
                    self._owner = Owner(self.path, owner.PATIENCE_SECONDS)
                except ConfigError as error:
                    return str(error)
            return ""

        taken = self.on_all_ranks(_PLACE, take, "Give a directory that can be written to.")
        refusal = all_gather_at(self.comm, _PLACE, taken)[0]
        if refusal:
            raise alike(refusal)
        if self._owner is not None and not self._owner.locked:
            said = f"hvdx: {self.path}: this file system has no locks: a second job that saves here goes unnoticed."
            print(said, file=sys.stderr, flush=True)

    def release(self) -> None:
        """Let another job have the folder."""
        if self._owner is not None:
            self._owner.release()

    def _probe(self) -> None:
        token = all_gather_at(self.comm, _PLACE, uuid.uuid4().hex[:8])[0]
        probe = self.path / f"{_AWAY}probe-{token}"

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
        end = time.monotonic() + _PATIENCE_SECONDS
        while not probe.is_dir() and time.monotonic() < end:
            time.sleep(0.05)
        if not probe.is_dir():
            raise HvdxError(f"{self.path.resolve()} on {socket.gethostname()} is not the directory of rank 0")
        (probe / str(self.comm.rank)).write_text("")

    def _tidy(self) -> None:
        for left in self.path.glob(f"{_AWAY}*"):
            if left.name == owner.NAME:
                continue
            replaced = left.name.removeprefix(f"{_AWAY}replaced-")
            if _NAME.fullmatch(replaced) and not (self.path / replaced).exists():
                left.rename(self.path / replaced)
            else:
                shutil.rmtree(left, ignore_errors=True)

    # -- the checkpoints ----------------------------------------------------------------------------------------------

    def positions(self) -> list[Position]:
        """Where the checkpoints are in the training, as rank 0 sees them, the newest last. Collective."""
        return all_gather_at(self.comm, _PLACE, self._listed() if self.comm.rank == 0 else None)[0]

    def _listed(self) -> list[Position]:
        return positions_in(self.path)

    def at(self, position: Position) -> Path:
        """The folder of one checkpoint."""
        step = f"-step-{position.step:08d}" if position.step else ""
        return self.path / f"epoch-{position.epoch:04d}{step}"

    def partial(self, token: str) -> Path:
        """Where a checkpoint is while it is written."""
        return self.path / f"{_AWAY}saving-{token}"

    def publish(self, partial: Path, position: Position, keep: int) -> None:
        """Give a complete checkpoint its name, and remove those that are too many. On rank 0 alone.

        Those that seem to be later were made before it, by more or fewer ranks, whose steps are of other sizes.

        Args:
            partial: where it is.
            position: of it.
            keep: how many checkpoints may stay, this one included.

        Raises:
            OSError: the checkpoint was not published; the existing checkpoints are unchanged.
        """
        sync(partial)
        final = self.at(position)
        replaced = self.path / f"{_AWAY}replaced-{final.name}"
        taken = final.exists()
        if taken:
            shutil.rmtree(replaced, ignore_errors=True)
            # A job that is killed before the next rename finds it again: see _tidy.
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
        there = self._listed()
        self._remove([p for p in there if p > position])
        self._remove([p for p in there if p <= position][:-keep])

    def _remove(self, positions: Sequence[Position]) -> None:
        for position in positions:
            away = self.path / f"{_AWAY}removed-{uuid.uuid4().hex[:8]}"
            with contextlib.suppress(OSError):  # too many are no reason to stop
                self.at(position).rename(away)
            shutil.rmtree(away, ignore_errors=True)

    def set_aside(self, position: Position) -> None:
        """Take a damaged checkpoint out of the way, so that its name can be used again. On rank 0 alone."""
        name = f"damaged-{self.at(position).name}"
        free = next(n for n in (name, *(f"{name}-{i}" for i in range(2, 1000))) if not (self.path / n).exists())
        self.at(position).rename(self.path / free)


def positions_in(path: str | os.PathLike[str]) -> list[Position]:
    """Where the checkpoints of a folder are in the training, as this rank sees them, the newest last."""
    entries = os.listdir(path) if os.path.isdir(path) else ()
    found = (_NAME.fullmatch(entry) for entry in entries)
    return sorted(Position(int(match[1]), int(match[2] or 0)) for match in found if match)


class Saved:
    """A checkpoint that is there.

    Args:
        path: its folder.

    Attributes:
        manifest: what it holds.

    Raises:
        CheckpointError: it is damaged.
        ConfigError: it was written by another version.
    """

    def __init__(self, path: Path):
        self.path = path
        with whole(path / "manifest.json"):
            self.manifest: dict[str, Any] = dict(json.loads((path / "manifest.json").read_text()))
            missing = [key for key in _KEYS if self.manifest["format"] == FORMAT and key not in self.manifest]
            if missing:
                raise ValueError(f"it does not say {missing}")
        if self.manifest.get("format") != FORMAT:
            raise ConfigError(
                f"{path}: expected format {FORMAT}, got {self.manifest.get('format')!r}. It was saved by another "
                "version of hvdx: use that one, or another directory."
            )
        self._files: dict[str, Arrays] = {}

    def shared(self) -> Arrays:
        """What is alike on all ranks."""
        return self._of(SHARED)

    def rank(self, rank: int) -> Arrays:
        """What belonged to one rank."""
        return self._of(of_rank(rank))

    def _of(self, name: str) -> Arrays:
        if name not in self._files:
            self._files[name] = Arrays.of(self.path / name)
        return self._files[name]


def one_line(error: Exception) -> str:
    """An error in one line, for other ranks."""
    return str(error) if isinstance(error, HvdxError) else f"{type(error).__name__}: {error}"


def alike(message: str) -> ConfigError:
    """An error that all ranks find."""
    error = ConfigError(message)
    error.collective = True
    return error
