"""Writes checkpoints while the training goes on: every rank its own file, and rank 0 gives the whole its name."""

import json
import os
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvdx.comm.waiting import LIMIT_VARIABLE, time_limit
from hvdx.errors import HvdxError
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.checkpoint import files
from hvdx.keras.checkpoint.contents import Data, Snapshot, snapshot, value_of
from hvdx.keras.checkpoint.folder import FORMAT, SHARED, Folder, Position, alike, of_rank, one_line
from hvdx.keras.fit import data
from hvdx.keras.fit.sync_callback import all_gather_at
from hvdx.keras.joining import join

_REMEDY = "The checkpoints before it are as they were."
# How often rank 0 looks whether the others have written theirs; and for how long, once they say that they have: file
# systems of a network take a moment.
_LOOK_SECONDS = 0.02
_PATIENCE_SECONDS = 3.0

_writing: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


class Writer:
    """Writes the checkpoints of one folder, one after the other, beside the training.

    The ranks exchange nothing until a checkpoint is finished: that the files of all are there is what tells rank 0
    that they are written. Rank 0 keeps the memory of one copy of what is alike on all ranks.

    Args:
        folder: where to.
        keep: how many checkpoints may stay.
    """

    def __init__(self, folder: Folder, keep: int):
        self._folder, self._keep = folder, keep
        self._begun = False
        self._thread: threading.Thread | None = None
        self._partial = Path()
        self._place = ""
        self._problem: Exception | None = None
        self._copies: dict[str, np.ndarray] = {}
        self._mine_written, self._all_written = threading.Event(), threading.Event()

    @property
    def problem(self) -> str:
        """Why this rank could not write; "" where it could, or is still writing."""
        return "" if self._problem is None else one_line(self._problem)

    def start(self, position: Position, what: Snapshot) -> None:
        """Begin to write a checkpoint, once the one before it is written. Collective.

        Args:
            position: where the training is.
            what: what is written; when this returns, the training may go on.

        Raises:
            ReplicaError: see `finish`.
        """
        self.finish()
        self._place = f"saving {position}"
        token = all_gather_at(self._folder.comm, self._place, uuid.uuid4().hex[:8])[0]
        self._partial = self._folder.partial(token)
        self._mine_written.clear()
        self._all_written.clear()
        self._begun = True
        try:
            self._copy(what.shared)
        except Exception as error:  # on rank 0 alone; the others hear of it when they finish
            self._problem = error
            self._tell(error)
            self._mine_written.set()
            return
        self._thread = threading.Thread(target=self._write, args=(position, what), name="hvdx-checkpoint", daemon=True)
        _writing.add(self._thread)
        self._thread.start()

    def _copy(self, variables: Mapping[str, Any]) -> None:
        """Copy into the memory of the copy before: to be given fresh memory takes longer than to copy."""
        before, self._copies = self._copies, {}
        for name, variable in variables.items():
            value = value_of(variable)
            copy = before.pop(name, None)
            if copy is None or copy.shape != value.shape or copy.dtype != value.dtype:
                copy = np.empty_like(value, order="C")
            np.copyto(copy, value)
            self._copies[name] = copy

    def finish(self) -> None:
        """Wait until what was begun has its name. Collective.

        Raises:
            ReplicaError: on all ranks, if one could not write; the checkpoints that were there still are.
        """
        if not self._begun:
            return
        self._begun = False
        self._mine_written.wait()
        all_gather_at(self._folder.comm, self._place)
        self._all_written.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None

        def say() -> None:
            if problem is not None:
                raise problem

        try:
            self._folder.on_all_ranks(self._place, say, _REMEDY)
        except HvdxError as error:
            # Only once all have failed: for a rank that failed alone, another might be giving it its name now.
            if error.collective:
                shutil.rmtree(self._partial, ignore_errors=True)
            raise

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _write(self, position: Position, what: Snapshot) -> None:
        try:
            self._write_own(position, what)
            self._mine_written.set()
            if self._folder.comm.rank == 0:
                self._await_others()
                self._folder.publish(self._partial, position, self._keep)
        except Exception as error:
            self._problem = error
            self._tell(error)
        finally:
            self._mine_written.set()

    def _write_own(self, position: Position, what: Snapshot) -> None:
        rank, partial = self._folder.comm.rank, self._partial
        partial.mkdir(parents=True, exist_ok=True)
        contents = {partial / of_rank(rank): lambda file: files.write_arrays(file, what.mine)}
        if rank == 0:
            says = {"format": FORMAT, "ranks": self._folder.comm.size, "epoch": position.epoch, "step": position.step}
            text = json.dumps(says | what.manifest, indent=1)
            contents |= {
                partial / SHARED: lambda file: files.write_arrays(file, self._copies),
                partial / "manifest.json": lambda file: file.write(text.encode()),
            }
        files.write(contents)

    def _await_others(self) -> None:
        """Wait until the files of all ranks are there."""
        wanted = {of_rank(rank): rank for rank in range(self._folder.comm.size)}
        end, looked_last = time.monotonic() + time_limit(), False
        while True:
            there = set(os.listdir(self._partial))
            missing = [rank for name, rank in wanted.items() if name not in there]
            if not missing:
                return
            failed = [rank for rank in missing if f"rank-{rank}.failed" in there]
            if failed:
                raise HvdxError(f"ranks {failed} could not write theirs")
            if self._all_written.is_set() and not looked_last:
                end, looked_last = time.monotonic() + _PATIENCE_SECONDS, True
                # A change of one's own has a network's file system look at the folder anew.
                (self._partial / "look").touch()
                (self._partial / "look").unlink()
            if time.monotonic() > end and looked_last:
                raise HvdxError(f"what ranks {missing} wrote is not here. Give a directory that all hosts share")
            if time.monotonic() > end:
                raise HvdxError(f"ranks {missing} were still writing after {time_limit():.0f} s ({LIMIT_VARIABLE})")
            time.sleep(_LOOK_SECONDS)

    def _tell(self, error: Exception) -> None:
        """Spare rank 0 the waiting, where a few bytes can still be written."""
        try:
            self._partial.mkdir(parents=True, exist_ok=True)
            (self._partial / f"rank-{self._folder.comm.rank}.failed").write_text(one_line(error))
        except OSError:
            return


def wait_for_all() -> None:
    """Wait for what earlier trainings of this process are still writing."""
    for thread in list(_writing):
        thread.join()


def save(directory: str | os.PathLike[str], model: Any, epoch: int, keep: int = 2) -> None:
    """Save a model with its optimisers, and what each rank keeps for itself, in a loop of your own. Collective.

    Args:
        directory: all hosts have to see it.
        model: it holds its optimisers: `model.compile(optimizer)`, or `model.optimizer = optimizer`.
        epoch: how many epochs it was trained.
        keep: how many checkpoints may stay.

    Raises:
        ConfigError: the directory holds later epochs, or another job is saving there.
        ReplicaError: on all ranks, if one could not write; what was there before still is.
    """
    folder, position = Folder(os.fspath(directory), join()), Position(epoch)
    refuse_later(folder, position)
    for optimizer in optimizers_of(model):
        adapter = adapter_of(optimizer)
        if adapter is not None:
            adapter.before_saving()
    folder.own()
    try:
        writer = Writer(folder, keep)
        writer.start(position, snapshot(model, folder.comm.rank, Data(data.state()[0])))
        writer.finish()
    finally:
        folder.release()


def refuse_later(folder: Folder, position: Position) -> None:
    """Stop unless a checkpoint will be the newest. Collective.

    Raises:
        ConfigError: on all ranks.
    """
    later = [p for p in folder.positions() if p > position]
    if later:
        raise alike(
            f"{folder.path}: expected to save after {later[-1]}, which is there already, got {position}. Restore it "
            "before you train, or give another directory."
        )
