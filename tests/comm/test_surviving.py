"""The ranks that are left go on after deaths: a model of all interleavings, and real ranks that die."""

# Tests: hvdx/comm/watchdog.py

import functools
import re
import sys
from collections.abc import Iterator

import pytest

from hvdx.cli.common.mpi_tools import mpirun_command
from hvdx.comm.surviving import Step, protocol
from tests.launch import run_command

# -- a model of the protocol over MPI's promises ------------------------------------------------------------

# Number of units that each rank completes.
_UNITS = 2


@functools.cache
def _next(answers: tuple[bool, ...]) -> Step | None:
    """Return the step of a rank that has had these answers; None after the last unit."""
    steps, units = protocol(), 0
    step = next(steps)
    for answer in answers:
        try:
            step = steps.send(answer)
        except StopIteration:
            units, steps = units + 1, protocol()
            step = next(steps)
    return None if units == _UNITS else step


class _World:
    """State of three ranks: the answers of each, its group, and what has happened in each group.

    MPI promises: a collective of a group ends well only after all its ranks have joined it, but a rank may then still
    see an error if its neighbour died or the group was revoked; an agreement has one result on all ranks; a
    shrunk group is the same on all.
    """

    def __init__(self, ranks: int, impatience: int):
        # Waits that may still end although nobody has died: a rank may hang, or be slow.
        self.impatience = impatience
        self.answers: list[tuple[bool, ...]] = [()] * ranks
        self.alive = [True] * ranks
        self.group = [0] * ranks
        self.members = [tuple(range(ranks))]
        self.revoked = [False]
        # By group and number of the collective or agreement in it: who has joined, with which word, and the result.
        self.joined: dict[tuple[object, ...], dict[int, bool]] = {}
        self.decided: dict[tuple[object, ...], int] = {}
        self.count = [0] * ranks
        # Unit, and the ranks whose values its result holds.
        self.results: list[tuple[tuple[int, ...], ...]] = [()] * ranks
        self.last: list[tuple[int, ...]] = [()] * ranks

    def key(self) -> object:
        inside = sorted((key, tuple(sorted(value.items()))) for key, value in self.joined.items())
        return (
            tuple(self.answers), tuple(self.alive), tuple(self.group), tuple(self.members), tuple(self.revoked),
            tuple(inside), tuple(sorted(self.decided.items())), tuple(self.count), tuple(self.results),
            tuple(self.last), self.impatience,
        )  # fmt: skip

    def copy(self) -> "_World":
        other = _World(len(self.alive), self.impatience)
        for name, value in vars(self).items():
            if name != "impatience":
                copied = {k: dict(v) for k, v in value.items()} if name == "joined" else value.copy()
                setattr(other, name, copied)
        return other

    def step_of(self, rank: int) -> Step | None:
        return _next(self.answers[rank]) if self.alive[rank] else None

    def said(self, rank: int) -> bool:
        """Return the last answer of a rank, which its next agreement combines with those of the others."""
        return bool(self.answers[rank] and self.answers[rank][-1])

    def after(self, rank: int) -> Iterator["_World"]:
        """Yield every state to which a move of this rank leads; none if it waits."""
        step, group = self.step_of(rank), self.group[rank]
        if step is None:
            return
        members = self.members[group]
        dead = [r for r in members if not self.alive[r]]
        place = (str(step), group, self.count[rank])
        if step is Step.REVOKE:
            other = self.copy()
            other.revoked[group] = True
            yield other._answered(rank, self.said(rank))
            return
        here = self.joined.get(place, {})
        if rank not in here:
            other = self.copy()
            other.joined.setdefault(place, {})[rank] = self.said(rank)
            yield other
            return
        complete = all(r in here or not self.alive[r] for r in members)
        if step in (Step.WORK, Step.JOIN):
            if all(r in here for r in members):
                other = self.copy()
                other.last[rank] = members
                yield other._answered(rank, True)
            # Only the rank that waits for a dead one need notice its death; others may wait for that rank.
            if members[members.index(rank) - 1] in dead or self.revoked[group]:
                yield self.copy()._answered(rank, False)
            elif self.impatience and not all(r in here for r in members):
                other = self.copy()
                other.impatience -= 1
                yield other._answered(rank, False)
        elif step is Step.AGREE and (complete or place in self.decided):
            other = self.copy()
            word = not dead and all(here.get(r, False) for r in members)
            result = bool(other.decided.setdefault(place, int(word)))
            yield other._answered(rank, result)
        elif step is Step.SHRINK and (complete or place in self.decided):
            other = self.copy()
            if place not in other.decided:
                other.decided[place] = len(other.members)
                other.members.append(tuple(r for r in members if self.alive[r]))
                other.revoked.append(False)
            other.group[rank], other.count[rank] = other.decided[place], 0
            yield other._answered(rank, True, moved=True)

    def _answered(self, rank: int, answer: bool, moved: bool = False) -> "_World":
        step = _next(self.answers[rank])
        before = _units_after(self.answers[rank])
        self.answers[rank] = (*self.answers[rank], answer)
        if step is Step.AGREE:
            self.count[rank] += 1
        if _units_after(self.answers[rank]) > before:
            self.results[rank] = (*self.results[rank], self.last[rank])
        return self


@functools.cache
def _units_after(answers: tuple[bool, ...]) -> int:
    steps, units = protocol(), 0
    next(steps)
    for answer in answers:
        try:
            steps.send(answer)
        except StopIteration:
            units, steps = units + 1, protocol()
            next(steps)
    return units


@pytest.mark.parametrize(("deaths", "impatience", "least_states"), [(1, 0, 1_000), (2, 0, 5_000), (1, 1, 5_000)])
def test_protocol_in_every_interleaving(deaths: int, impatience: int, least_states: int) -> None:
    begin = _World(3, impatience)
    seen, waiting, ends = {begin.key()}, [begin], 0
    while waiting:
        world = waiting.pop()
        moves = [other for rank in range(3) for other in world.after(rank)]
        left = [rank for rank in range(3) if world.alive[rank]]
        if not moves:
            ends += 1
            assert all(world.step_of(rank) is None for rank in left), "the ranks wait for each other"
            assert len({world.results[rank] for rank in left}) == 1, "the ranks have different results"
            assert len({world.group[rank] for rank in left}) == 1
        units = [len(world.results[rank]) for rank in left]
        for rank in left:
            assert world.results[rank] == max((world.results[r] for r in left), key=len)[: units[left.index(rank)]]
        if len(left) > 3 - deaths:
            for rank in left:
                if world.step_of(rank) is not None:
                    other = world.copy()
                    other.alive[rank] = False
                    moves.append(other)
        for other in moves:
            key = other.key()
            if key not in seen:
                seen.add(key)
                waiting.append(other)
    assert len(seen) > least_states
    assert ends


# -- real ranks ------------------------------------------------------------

# Rank 3 dies, and rank 0 while the others recover. Then rank 2 stops, and rank 4 sleeps. Rank 1, which is left, raises
# an error.
_SCRIPT = """
import os, signal, sys, time
import numpy as np
from hvdx.comm import start
from hvdx.comm.mpi import MpiComm
comm = start()
me, channel = comm.rank, comm.channel("a test")
recover = MpiComm.of_survivors
if me == 0:
    MpiComm.of_survivors = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
for number in range(40):
    if me == 3 and number == 10:
        os._exit(3)
    if me == 2 and number == 20:
        os.kill(os.getpid(), signal.SIGSTOP)
    if me == 4 and number == 30:
        time.sleep(1000)
    found = comm.all_gather_object((number, me), "a test")
    assert {n for n, _ in found} == {number}, found
    channel.sum_in_order(total := np.full(300_000, 1.0 + me, np.float32))
    assert total[-1] == sum(1.0 + rank for rank in comm.world_ranks), (total, comm.world_ranks)
    channel.all_reduce(total)
print("LEFT", me, comm.rank, comm.size, list(comm.world_ranks), flush=True)
sys.exit(5)
"""


def test_ranks_go_on_without_those_that_die_or_hang() -> None:
    command = [sys.executable, "-m", "hvdx", "run", "-n", "5", "--survive", sys.executable, "-c", _SCRIPT]
    done = run_command(command, 60, {"HVDX_TIMEOUT": "2"})
    assert "LEFT 1 0 1 [1]" in done.out, done
    lines = done.out.splitlines()
    for head in ("rank 0 on", "rank 3 on", "rank 2 on", "rank 4 on"):
        assert any(head in line and "died" in line for line in lines), done
    assert sum("rank 2 on" in line and "stopped for 2 s" in line for line in lines) == 1, done
    assert sum("rank 4 on" in line and "no progress for 2 s" in line and ":17 in" in line for line in lines) == 1, done
    # Nobody has ended with 0.
    assert done.code == 5, done


# With the process that would end it, so that nobody does.
_STOP = """
import os, signal
from hvdx.comm import start
comm = start()
if comm.rank == 1:
    os.kill(os.getppid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
comm.all_gather_object(0, "a test")
"""


def test_job_ends_if_nobody_can_end_a_rank_that_hangs() -> None:
    command = [sys.executable, "-m", "hvdx", "run", "-n", "2", "--survive", sys.executable, "-c", _STOP]
    done = run_command(command, 60, {"HVDX_TIMEOUT": "1"})
    assert done.code == 1, done
    assert "ExchangeError: a rank has not answered for 4 s" in done.out, done
    assert "no worker has moved for 1 s" in done.out, done


# What is registered first runs last: rank 1 seems to hang in `MPI_Finalize`. Rank 2 dies after the last exchange.
_END = """
import atexit, os, signal, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    atexit.register(time.sleep, 1000)
from hvdx.comm import start
if start().rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_end_in_mpi_has_a_limit() -> None:
    command = [sys.executable, "-m", "hvdx", "run", "-n", "3", "--survive", sys.executable, "-c", _END]
    done = run_command(command, 60, {"HVDX_TIMEOUT": "2"})
    assert done.code == 0, done
    assert re.search(r"rank 2 on \S+ died after the last exchange: crashed with SIGKILL", done.out), done


_RUN = [sys.executable, "-m", "hvdx", "run"]


def test_refusals_name_the_remedy() -> None:
    for environment, options, expected in (
        ({"HVDX_SURVIVE": "1"}, mpirun_command(2), "mpirun --with-ft ulfm"),
        ({"HVDX_SPLIT": "2"}, [*_RUN, "-n", "2", "--survive"], "got split=2. Do: hvdx run --max-r"),
    ):
        program = [sys.executable, "-c", "from hvdx.comm import start; start()"]
        done = run_command([*options, *program], 60, environment)
        assert done.code, done
        assert expected in done.out, done
