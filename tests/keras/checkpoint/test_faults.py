"""Faults at each file operation of a save: existing checkpoints stay intact, and the next job resumes.

Two virtual ranks save in a forked child, one after the other, so that the operations come in a known order. A first
save counts the operations. One more save follows for each operation, in which the ranks are killed or the disk fails at
that operation.
"""

# Tests: hvdx/keras/checkpoint/contents.py, hvdx/keras/checkpoint/folder.py, hvdx/keras/checkpoint/restoring.py
# Tests: hvdx/keras/checkpoint/writer.py

import itertools
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from hvdx.comm.local import LocalComm
from hvdx.errors import HvdxError, ReplicaError
from hvdx.keras.checkpoint import restoring, writer
from hvdx.keras.checkpoint.contents import Snapshot
from hvdx.keras.checkpoint.folder import SHARED, Folder, Position, Saved, of_rank
from hvdx.keras.checkpoint.writer import Writer
from tests.keras.checkpoint.faulty_disk import Disk, Operation, forked
from tests.strategies.virtual import on_all

RANKS, KEEP, OLD, NEW, NEXT = 2, 2, 1.0, 2.0, 3.0
LATER, LIMIT = Position(9), 20.0
MANIFEST = dict.fromkeys(("drawn", "skip", "steps", "share", "samples", "weights", "optimizer", "own", "optimizers"))


class Case(NamedTuple):
    """Save with a fault.

    Attributes:
        existing: positions of the checkpoints before the save.
        new: position of the checkpoint that is saved.
        left: positions of the checkpoints after the save, without a fault.
        first: rank that writes its files first.
        only_publishing: whether only faults after all files are written are tried; another case tries the others.
    """

    existing: list[Position]
    new: Position
    left: list[Position]
    first: int = 1
    only_publishing: bool = False


CASES = {
    "rank 1 writes first": Case([Position(1), Position(2)], Position(3), [Position(2), Position(3)]),
    "rank 0 writes first": Case([Position(1), Position(2)], Position(3), [Position(2), Position(3)], first=0),
    "its name is taken": Case([Position(1), Position(2)], Position(2), [Position(1), Position(2)], 1, True),
    "one is later": Case(
        [Position(1), Position(1, 9)], Position(1, 5), [Position(1), Position(1, 5)], only_publishing=True
    ),
}
# Python 3.12 and later warn of a fork in a process with threads. The children do not use those of TensorFlow.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@pytest.fixture(autouse=True)
def plain_and_quick(monkeypatch):
    """Use arrays for variables and for the model, and do not wait for a disk or a network."""
    monkeypatch.setattr(writer, "value_of", np.asarray)
    monkeypatch.setattr(writer, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(writer, "_GRACE_SECONDS", 0.05)
    monkeypatch.setattr(restoring, "LoadedCheckpoint", StandIn)
    monkeypatch.setattr("os.fsync", lambda handle: None)


def content(value, rank):
    """Return the contents that a rank saves; all elements have one value."""
    shared = {"weights.0": np.full((3, 2), value), "weights.1": np.full(2, value, "f4")} if rank == 0 else {}
    return Snapshot(MANIFEST, shared, {"random": np.full(4, value), "flag": np.full((), value, "f2")})


def value_in(saved):
    """Read a whole checkpoint, with its checksums, and return the value of all elements."""
    files = [saved.shared(), *map(saved.rank, range(saved.manifest["ranks"]))]
    assert all(len(file) == 2 for file in files)
    (value,) = {float(v) for file in files for array in file.values() for v in array.ravel()}
    return value


class StandIn:
    """Stand-in for `LoadedCheckpoint` that reads the whole checkpoint."""

    def __init__(self, model, saved, rank, size):
        self._found = Position(saved.manifest["epoch"], saved.manifest["step"]), value_in(saved)

    def apply(self, folder, place):
        return self._found


class InTurn(Writer):
    """Writer that writes its files after another writer.

    Args:
        folder, keep: as for `Writer`.
        waits: called when this rank begins to wait for the files of other ranks.
    """

    def __init__(self, folder: Folder, keep: int, waits: Callable[[], None]):
        super().__init__(folder, keep)
        self.after: InTurn | None = None
        self._waits = waits
        self.written, self.ended = threading.Event(), threading.Event()

    def _write(self, position, content):
        if self.after is not None:
            self.after.written.wait()
        super()._write(position, content)
        self.written.set()
        self.ended.set()

    def _await_others(self):
        self.written.set()
        self._waits()
        return super()._await_others()


class Done(NamedTuple):
    """Outcome of a save.

    Attributes:
        errors: error of each rank, or None; empty if the ranks were killed.
        operations: operations on the disk.
        outputs: paths of the files that were opened through `Output`.
    """

    errors: list[Exception | None]
    operations: list[Operation]
    outputs: list[Path]


def save(case: Case, *faults: tuple[Path, int | None], kill: bool = False) -> list[Done]:
    """Save on two ranks in a child process, once for each fault.

    Args:
        case: case of the save.
        faults: pairs of a folder and the number of the operation that fails, or None for no fault.
        kill: whether the ranks are killed at that operation.

    Returns:
        The outcome of each save.
    """

    def in_child() -> list[Done]:
        disk, done = Disk(), []
        for folder, at in faults:
            disk.watch(folder, at, kill)
            if kill:
                threading.Thread(target=on_ranks, args=(folder, case, disk), daemon=True).start()
                assert disk.killed.wait(LIMIT), f"operation {at} was not reached"
                errors = []
            else:
                errors = on_ranks(folder, case, disk)
            done.append(Done(errors, disk.operations, disk.outputs))
        return done

    return forked(in_child)


def on_ranks(folder: Path, case: Case, disk: Disk) -> list[Exception | None]:
    """Save on two virtual ranks, and return the error of each."""
    writers: dict[int, InTurn] = {}
    ready = threading.Barrier(RANKS)

    def on_rank(comm) -> Exception | None:
        writers[comm.rank] = mine = InTurn(Folder(str(folder), comm), KEEP, disk.waits)
        ready.wait()
        mine.after = None if comm.rank == case.first else writers[case.first]
        try:
            mine.start(case.new, content(NEW, comm.rank))
            if comm.rank > 0:
                mine.ended.wait()
                if not mine.problem:
                    # Rank 0 sees all files before it is told that they are written, so it makes no last look.
                    writers[0].ended.wait()
            mine.finish()
        except HvdxError as error:
            return error
        return None

    return on_all(RANKS, on_rank)


def save_alone(folder: Path, position: Position, value: float) -> None:
    """Save in this process, a world of one, as the next job does."""
    alone = Writer(Folder(str(folder), LocalComm()), KEEP)
    alone.start(position, content(value, 0))
    alone.finish()


@pytest.fixture
def make_folder(tmp_path):
    """Return a function that makes a folder with the checkpoints before the save."""

    def make(case: Case, name: object = None) -> Path:
        base, folder = tmp_path / "base", tmp_path / f"at-{name}"
        if not base.exists():
            for position in case.existing:
                save_alone(base, position, OLD)
        shutil.copytree(base, folder)
        return folder

    return make


def points(folder: Path, case: Case) -> dict[int, str]:
    """Return the operations at which faults are tried, by their numbers."""
    (done,) = save(case, (folder, None))
    assert done.errors == [None] * RANKS
    assert names(folder) == names_of(folder, case.left)
    whats = [operation.what for operation in done.operations]
    assert set(whats) == {"mkdir", "create", "write", "fsync", "rename", "open", "remove", "rmdir"}
    written = max(i for i, o in enumerate(done.operations) if o.to is not None and o.to.parent != folder)
    return {at: what for at, what in enumerate(whats) if at >= written or not case.only_publishing}


def with_faults(make_folder: Callable[..., Path], case: Case, kill: bool = False) -> list[tuple[Path, Done]]:
    """Save once for each operation with a fault; return each folder and outcome."""
    expected = points(make_folder(case), case)
    folders = [make_folder(case, at) for at in expected]
    saves = save(case, *zip(folders, expected, strict=True), kill=kill)
    assert [done.operations[at].what for done, at in zip(saves, expected, strict=True)] == list(expected.values())
    return list(zip(folders, saves, strict=True))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def names_of(folder: Path, positions: list[Position]) -> list[str]:
    return sorted(Folder(str(folder), LocalComm()).at(position).name for position in positions)


def bytes_of(folder: Path) -> dict[Path, bytes | None]:
    """Return the content of each file, and None for each folder."""
    return {path.relative_to(folder): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


def assert_published_are_intact(folder: Path) -> None:
    for path in folder.glob("epoch-*"):
        assert value_in(Saved(path)) in (OLD, NEW)


def resume(folder: Path, case: Case, capsys: pytest.CaptureFixture[str]) -> float:
    """Run the next job, which restores, saves, and leaves only checkpoints; return the restored value."""
    again = Folder(str(folder), LocalComm())
    again.check()
    again.release()
    assert not list(folder.glob(".*"))
    assert_published_are_intact(folder)
    position, value = restoring.restore_newest(again, None)
    assert (position, value) in [(case.existing[-1], OLD), (case.new, NEW)]
    save_alone(folder, LATER, NEXT)
    assert names(folder) == names_of(folder, [position, LATER])
    assert value_in(Saved(again.at(LATER))) == NEXT
    assert "damaged" not in "".join(capsys.readouterr())
    return value


@each_case
def test_kill_at_any_operation_leaves_the_old_or_the_new_checkpoint(make_folder, capsys, case):
    found = []
    for folder, _ in with_faults(make_folder, case, kill=True):
        assert_published_are_intact(folder)
        found.append(resume(folder, case, capsys))
    assert [value for value, _ in itertools.groupby(found)] == [OLD, NEW], found


@each_case
def test_disk_failure_at_any_operation_is_an_error_and_changes_nothing(make_folder, capsys, case):
    before = bytes_of(make_folder(case, "before"))
    outcomes = set()
    for folder, done in with_faults(make_folder, case):
        outcomes.add(any(done.errors))
        if any(done.errors):
            assert {type(error) for error in done.errors} == {ReplicaError}, done
            (text,) = {str(error) for error in done.errors}
            assert re.search(rf"saving {case.new}: .*rank [01]: OSError: .*(No space left|Input/output)", text), text
            assert text.endswith(". Earlier checkpoints are unchanged.")
            assert bytes_of(folder) == before, done
        else:
            # A failed removal of an old checkpoint is not an error.
            assert value_in(Saved(folder / names_of(folder, [case.new])[0])) == NEW, done
            assert_published_are_intact(folder)
        resume(folder, case, capsys)
    assert outcomes == {True, False}


@each_case
def test_files_are_on_the_disk_before_they_are_renamed(make_folder, case):
    folder = make_folder(case)
    (done,) = save(case, (folder, None))
    operations = done.operations
    (final,) = (folder / name for name in names_of(folder, [case.new]))
    (published,) = (i for i, o in enumerate(operations) if o.to == final)
    partial = operations[published].path

    created = [o.path for o in operations if o.what == "create"]
    assert sorted(created) == sorted(done.outputs), "a file was not written through Output"
    assert sorted(path.name for path in created) == sorted(
        f"{name}.partial" for name in (SHARED, "manifest.json", *map(of_rank, range(RANKS)))
    )
    for path in created:
        of_file = [o.what for o in operations if o.path == path]
        assert of_file == ["create", *["write"] * (len(of_file) - 3), "fsync", "rename"], path
        assert Operation("rename", path, path.with_suffix("")) in operations[:published]
    # Order: the files of the checkpoint, the name of its folder, then removals.
    within = [i for i, o in enumerate(operations) if o.what == "rename" and o.path.parent == partial]
    gone = [i for i, o in enumerate(operations) if o.what in ("remove", "rmdir")]
    assert max(within) < operations.index(Operation("fsync", partial)) < published
    assert published < operations.index(Operation("fsync", folder)) < min(gone)
