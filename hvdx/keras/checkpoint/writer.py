"""Writing of checkpoints while training continues: every rank writes its file, and rank 0 publishes the checkpoint."""

import os
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np

from hvdx.comm import supervision
from hvdx.comm.launcher import free_memory
from hvdx.comm.waiting import LIMIT_VARIABLE, time_limit
from hvdx.errors import ConfigError, HvdxError
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.checkpoint import files
from hvdx.keras.checkpoint.contents import Data, Snapshot, snapshot, value_of
from hvdx.keras.checkpoint.folder import FORMAT, SHARED, Folder, Position, of_rank, one_line
from hvdx.keras.fit import data
from hvdx.keras.fit.positions import all_gather_at
from hvdx.keras.joining import join
from hvdx.keras.types import Variable
from hvdx.keras.variables import bytes_of
from hvdx.log import Log

_log = Log(__name__)

_REMEDY = "Earlier checkpoints are unchanged."
# Seconds between two polls of rank 0 for the other ranks' files; and seconds for which rank 0 still polls after all
# ranks have written, because a network file system may show new files late.
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 3.0

# Share of a host's free memory that copies may take.
_MOST_OF_FREE = 0.9

_writing: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


class Writer:
    """Writer of the checkpoints of one folder, in a thread beside the training.

    While the files are written the ranks exchange no messages: rank 0 polls the folder until the files of all ranks
    exist. Each rank keeps memory for one copy of its arrays. If a host has too little memory for its ranks' copies,
    training waits until they are written.

    Args:
        folder: folder of the checkpoints.
        keep: number of checkpoints to keep.
    """

    def __init__(self, folder: Folder, keep: int):
        self._folder, self._keep = folder, keep
        self._saving = False
        # Rank and number of ranks, and recoveries, when the checkpoint was begun.
        self._place_of_rank, self._recoveries = (0, 1), 0
        self._owned = folder.comm.recoveries
        self._thread: threading.Thread | None = None
        self._partial = Path()
        self._place = ""
        self._problem: Exception | None = None
        self._copies: dict[str, np.ndarray] = {}
        self._said = False
        self._own_written, self._all_written = threading.Event(), threading.Event()

    @property
    def problem(self) -> str:
        """Error of this rank in one line; "" if there was none so far."""
        return "" if self._problem is None else one_line(self._problem)

    def start(self, position: Position, content: Snapshot) -> None:
        """Finish the previous checkpoint, and begin to write another. Collective.

        Training may continue when this method returns.

        Args:
            position: position of the training.
            content: contents of the checkpoint.

        Raises:
            ReplicaError: on all ranks, if one could not write the previous checkpoint.
        """
        self.finish()
        comm = self._folder.comm
        if self._owned != comm.recoveries:
            # The rank that owned the folder may have died.
            self._owned = comm.recoveries
            self._folder.own()
        self._place = f"saving {position}"
        values = content.shared | content.own
        token, needed = self._agree(values)
        self._place_of_rank, self._recoveries = (comm.rank, comm.size), comm.recoveries
        self._partial = self._folder.partial(token)
        self._own_written.clear()
        self._all_written.clear()
        self._saving = True
        free = free_memory()
        fits = free is None or needed <= _MOST_OF_FREE * free
        try:
            self._copy(values) if fits else self._view(values, needed, free or 0)
        except Exception as error:  # on rank 0 alone; `finish` raises it on all ranks
            self._problem = error
            self._report_failure(error)
            self._own_written.set()
            return
        self._thread = threading.Thread(
            target=self._write, args=(position, content), name="hvdx-checkpoint", daemon=True
        )
        _writing.add(self._thread)
        self._thread.start()
        if not fits:
            self._own_written.wait()
            self._copies = {}

    def _agree(self, values: Mapping[str, Variable | np.ndarray]) -> tuple[str, int]:
        """Return the checkpoint's token, and the bytes that the ranks of this host need for their copies."""
        comm, kept = self._folder.comm, sum(copy.nbytes for copy in self._copies.values())
        mine = uuid.uuid4().hex[:8], comm.hosts[comm.rank], sum(map(bytes_of, values.values())) - kept
        everyone = all_gather_at(comm, self._place, mine)
        return everyone[0][0], sum(needed for _, host, needed in everyone if host == mine[1])

    def _view(self, variables: Mapping[str, Variable | np.ndarray], needed: int, free: int) -> None:
        """Take variables where they are; the training waits then until they are written."""
        self._copies = {name: value_of(variable) for name, variable in variables.items()}
        if not self._said:
            self._said = True
            _log.warning(
                f"{self._place}: a copy would take {needed / 1e9:.1f} GB of the {free / 1e9:.1f} GB of memory that are "
                "free on this host, so the training waits while checkpoints are written. Do: start fewer workers a "
                'host, or save less often: Checkpoint(every="60 minutes").'
            )

    def _copy(self, variables: Mapping[str, Variable | np.ndarray]) -> None:
        """Copy variables into the memory of the previous copy, since allocating memory takes longer than copying."""
        before, self._copies = self._copies, {}
        for name, variable in variables.items():
            value = value_of(variable)
            copy = before.pop(name, None)
            if copy is None or copy.shape != value.shape or copy.dtype != value.dtype:
                copy = np.empty_like(value, order="C")
            np.copyto(copy, value)
            self._copies[name] = copy

    def finish(self) -> bool:
        """Wait until the checkpoint that was begun is published. Collective.

        Returns:
            False if it was given up, because a rank died while it was written.

        Raises:
            ReplicaError: on all ranks, if one could not write; earlier checkpoints are unchanged.
        """
        if not self._saving:
            return True
        self._saving = False
        self._own_written.wait()
        all_gather_at(self._folder.comm, self._place)
        self._all_written.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        comm = self._folder.comm
        if comm.survives and all_gather_at(comm, self._place, self._is_given_up)[0]:
            if comm.rank == 0:
                shutil.rmtree(self._partial, ignore_errors=True)
                _log.warning(f"{self._place}: a rank died while it was written. {_REMEDY}")
            return False

        def raise_problem() -> None:
            if problem is not None:
                raise problem

        try:
            self._folder.on_all_ranks(self._place, raise_problem, _REMEDY)
        except HvdxError as error:
            # The folder is removed only if all ranks raise: after an error on one rank, rank 0 may be publishing it.
            if error.collective:
                shutil.rmtree(self._partial, ignore_errors=True)
            raise
        return True

    @property
    def _is_given_up(self) -> bool:
        """True if a rank has died since the checkpoint was begun, and it is not published."""
        return self._folder.comm.recoveries != self._recoveries and self._partial.exists()

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _write(self, position: Position, content: Snapshot) -> None:
        copied = time.monotonic()
        try:
            self._write_own(position, content)
            self._own_written.set()
            if self._place_of_rank[0] == 0:
                if not self._await_others():
                    return
                self._folder.publish(self._partial, position, self._keep)
                folder, seconds = os.path.abspath(self._folder.path), time.monotonic() - copied
                supervision.report("saved", position=str(position), seconds=seconds, folder=folder)
        except Exception as error:
            self._problem = error
            self._report_failure(error)
        finally:
            self._own_written.set()

    def _write_own(self, position: Position, content: Snapshot) -> None:
        (rank, size), partial = self._place_of_rank, self._partial
        partial.mkdir(parents=True, exist_ok=True)
        mine = {name: self._copies[name] for name in content.own}
        shared = {name: self._copies[name] for name in content.shared}
        writes = {partial / of_rank(rank): lambda file: files.write_arrays(file, mine)}
        if rank == 0:
            manifest = {
                "format": FORMAT,
                "ranks": size,
                "epoch": position.epoch,
                "step": position.step,
            }
            text = files.sealed(manifest | content.manifest)
            writes |= {
                partial / SHARED: lambda file: files.write_arrays(file, shared),
                partial / "manifest.json": lambda file: file.write(text.encode()),
            }
        files.write(writes)

    def _await_others(self) -> bool:
        """Wait until the files of all ranks exist; return False if a rank has died.

        Raises:
            HvdxError: if a rank reports a failure, or if files are missing after the time limit.
        """
        wanted = {of_rank(rank): rank for rank in range(self._place_of_rank[1])}
        end, last_look = time.monotonic() + time_limit(), False
        while True:
            present = set(os.listdir(self._partial))
            missing = [rank for name, rank in wanted.items() if name not in present]
            if not missing:
                return True
            if self._folder.comm.recoveries != self._recoveries:
                return False
            failed = [rank for rank in missing if f"rank-{rank}.failed" in present]
            if failed:
                raise HvdxError(f"ranks {failed} could not write their files")
            if self._all_written.is_set() and not last_look:
                end, last_look = time.monotonic() + _GRACE_SECONDS, True
                # A change by this host makes a network file system refresh its view of the folder.
                (self._partial / "look").touch()
                (self._partial / "look").unlink()
            if time.monotonic() > end and last_look:
                raise HvdxError(f"the files of ranks {missing} are not here. Give a directory that all hosts share")
            if time.monotonic() > end:
                raise HvdxError(f"ranks {missing} were still writing after {time_limit():.0f} s ({LIMIT_VARIABLE})")
            time.sleep(_POLL_SECONDS)

    def _report_failure(self, error: Exception) -> None:
        """Write a file by which rank 0 learns of the failure at once; ignore an error of the file system."""
        try:
            self._partial.mkdir(parents=True, exist_ok=True)
            (self._partial / f"rank-{self._place_of_rank[0]}.failed").write_text(one_line(error))
        except OSError:
            return


def wait_for_all() -> None:
    """Wait until earlier trainings of this process have written their checkpoints."""
    for thread in list(_writing):
        thread.join()


def save(directory: str | os.PathLike[str], model: keras.Model, epoch: int, keep: int = 2) -> None:
    """Save a model, its optimisers and the rank-local state, for a training loop of your own. Collective.

    Args:
        directory: directory that all hosts share.
        model: model with its optimisers: `model.compile(optimizer)`, or `model.optimizer = optimizer`.
        epoch: number of epochs that the model was trained.
        keep: number of checkpoints to keep.

    Raises:
        ConfigError: if the directory holds later epochs, or another job is saving there.
        ReplicaError: on all ranks, if one could not write; earlier checkpoints are unchanged.
    """
    folder, position = Folder(os.fspath(directory), join()), Position(epoch)
    refuse_older(folder, position)
    for optimizer in optimizers_of(model):
        adapter = adapter_of(optimizer)
        if adapter is not None:
            adapter.before_saving()
    folder.own()
    try:
        writer = Writer(folder, keep)
        writer.start(position, snapshot(model, folder.comm, Data(data.state()[0])))
        writer.finish()
    finally:
        folder.release()


def refuse_older(folder: Folder, position: Position) -> None:
    """Refuse to save a checkpoint that would not be the newest. Collective.

    Raises:
        ConfigError: on all ranks, if the folder holds a later checkpoint.
    """
    later = [p for p in folder.positions() if p > position]
    if later:
        raise ConfigError.on_all_ranks(
            f"{folder.path}: expected to save after {later[-1]}, which is there already, got {position}. Restore it "
            "before you train, or give another directory."
        )
