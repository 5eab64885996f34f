"""Communicator of ranks that go on without one that dies, over Open MPI's ULFM (user-level failure mitigation).

The ranks repeat a unit of collectives (`Comm.complete`) in which a rank died, without it. `protocol` has the steps, and
docs/adr/0044 the reasons.
"""

import atexit
import contextlib
import enum
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from hvdx.comm import failure, launcher, spares, supervision, waiting
from hvdx.comm.interfaces import BufferFor, Cast, Channel, Comm, Death, Mailbox, Received, of_comm
from hvdx.comm.launcher import Launch
from hvdx.comm.mpi import MpiComm
from hvdx.comm.mpi_mailbox import Mortals, MpiMailbox
from hvdx.comm.waiting import LIMIT_VARIABLE, time_limit, until
from hvdx.comm.watchdog import Heartbeat
from hvdx.errors import ConfigError, ExchangeError, LaunchError
from hvdx.log import Log, set_rank

if TYPE_CHECKING:
    from mpi4py import MPI

_log = Log(__name__)

T = TypeVar("T")

#: Environment variables: the ranks go on without one that dies; and the least number of ranks that go on.
VARIABLE, LEAST_VARIABLE = "HVDX_SURVIVE", "HVDX_MIN_WORKERS"
#: Environment variable of `hvdx run`: number of the file descriptor of the standard output that rank 0 would show.
OUTPUT_VARIABLE = "HVDX_OUTPUT"
# Set by `mpirun --with-ft ulfm`.
_ULFM_VARIABLE = "OMPI_MCA_mpi_ft_enable"
# Tag that no message has.
_NO_TAG = 9
# Seconds for which an agreement waits, beyond the time after which a rank that hangs has been ended.
_GRACE_SECONDS = 2.0
# Recoveries in a row in which nobody has died; another error of MPI would repeat for ever.
_IN_VAIN = 3


class Step(enum.Enum):
    """Step of the protocol. The result of each is True or False; that of `REVOKE` and `SHRINK` is ignored.

    WORK: run the unit; True if this rank completed it.
    AGREE: return whether all ranks of the group are alive, and said True in their last step; the same on all ranks.
    REVOKE: make every collective of the group fail, on all ranks.
    SHRINK: form a new group of the ranks that live.
    JOIN: make the channels of the new group; True if this rank completed it.
    """

    WORK, AGREE, REVOKE, SHRINK, JOIN = range(5)


def protocol() -> Generator[Step, bool, None]:
    """Yield the steps of a unit of collectives on one rank; each is sent its result.

    The ranks leave the protocol together, with a unit that all who live completed in one group. `AGREE` has one result
    on all ranks, and every rank goes through one `AGREE` after each attempt. So no rank is ever a unit ahead.

    Example:
        >>> steps = protocol()
        >>> [next(steps), steps.send(True)]
        [<Step.WORK: 0>, <Step.AGREE: 1>]
    """
    step = Step.WORK
    while True:
        if not (yield step):
            # The others may wait for this rank in the unit.
            yield Step.REVOKE
        if (yield Step.AGREE):
            if step is Step.WORK:
                return
            step = Step.WORK
            continue
        yield Step.REVOKE
        yield Step.SHRINK
        step = Step.JOIN


def is_wanted() -> bool:
    """Return whether `HVDX_SURVIVE` asks for a communicator that survives.

    Raises:
        ConfigError: if it is neither 0 nor 1.
    """
    text = os.environ.get(VARIABLE, "") or "0"
    if text not in ("0", "1"):
        raise ConfigError.on_all_ranks(f"{VARIABLE}: expected 0 or 1, got {text!r}.")
    return text == "1"


class SurvivingComm(Comm):
    """Communicator of ranks that go on without one that dies. Creating it is collective.

    Args:
        launch: rank and size from the launcher; checked against MPI.
        servers: see `MpiComm`. A server's death is seen by mailboxes only; see `Mailbox.gone`.

    Raises:
        LaunchError: if MPI cannot survive the death of a rank; see also `MpiComm`.
        ConfigError: if `HVDX_MIN_WORKERS` is not a number of ranks, or there are servers and spares.
    """

    survives = True

    def __init__(self, launch: Launch, servers: int = 0):
        if os.environ.get(_ULFM_VARIABLE) != "1":
            raise LaunchError.on_all_ranks(
                f"{VARIABLE}=1: expected an Open MPI that was started to survive, got {launch.launcher}. Do: hvdx run "
                "--survive, or mpirun --with-ft ulfm of Open MPI 5; with another MPI, hvdx run --max-restarts."
            )
        from mpi4py import MPI

        self._mpi, self._limit = MPI, time_limit()
        self._least = _least_ranks((launch.size or 1) - servers)
        self.deaths: list[Death] = []
        self._lock, self._inside = threading.RLock(), False
        self._units = 0
        # Errors of units: their frames hold the buffers of requests that MPI may not have ended.
        self._kept: list[Exception] = []
        self._group: MPI.Comm | None = None
        self._spares: spares.Spares | None = None
        # Of the mailboxes; None before the first.
        self._mail: tuple[MPI.Comm, Mortals] | None = None
        everyone = MpiComm(launch, servers, watched=False, alive=self._check_alive)
        self._now: MpiComm | spares.EchoComm = everyone
        self._group = everyone.group
        self.servers, self.serves, self._workers = servers, everyone.serves, everyone.workers
        # Number in the world of each rank; host and cores of each, by this number.
        first = everyone.workers if everyone.serves else 0
        self._members = list(range(first, first + everyone.size))
        self._hosts = dict(zip(self._members, everyone.hosts, strict=True))
        masks = everyone.all_gather_object(launcher.core_mask(), "cores")
        self._masks: dict[int, int] = dict(zip(self._members, masks, strict=True))
        self.library = everyone.library
        count = spares.wanted(everyone.size)
        if everyone.mailbox_group is not None:
            self._refuse_spares(count)
            self._mail = self._make_mail(everyone.mailbox_group, range(launch.size or 1))
            if self.serves:
                supervision.report("server", rank=launch.rank)
        if count:
            self._spares = spares.Spares(everyone, count)
            self._leave_spares_out(everyone, self._spares)
        # Number of ranks at the start.
        self._full = len(self._members)
        self._take_places()
        self._heartbeat = Heartbeat(self._limit, self._is_awaited, self._name_if_mortal)
        atexit.register(self._limit_the_end)

    def _limit_the_end(self) -> None:
        """Let this process end by a signal if MPI does not end: Open MPI may wait for the dead in `MPI_Finalize`."""
        self._heartbeat.close()
        supervision.report("over", rank=self._members[self._now.rank], living=self._members)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(self._limit))

    def _leave_spares_out(self, everyone: MpiComm, beside: spares.Spares) -> None:
        number = everyone.rank
        self._group = beside.group
        self._members = list(range(beside.ranks))
        if beside.group is not None:
            self._now = everyone.of_survivors(beside.group, beside.hosts_of(self._members))
        else:
            self.waits, self._members[-1] = True, number
            self._now = spares.EchoComm(beside.ranks - 1, beside.ranks, self._hosts[number])
        self._share_cores()

    def _share_cores(self) -> None:
        """Divide the cores of this host among the ranks there."""
        host = self._now.hosts[self._now.rank]
        here = [rank for rank in self._members if self._hosts[rank] == host]
        number = self._members[self._now.rank]
        launcher.set_fair_cores(launcher.fair_cores([self._masks[rank] for rank in here], here.index(number)))

    def _take_places(self) -> None:
        now = self._now
        self.rank, self.size, self.hosts = now.rank, now.size, now.hosts
        self.local_rank, self.local_size = now.local_rank, now.local_size
        self.cross_rank, self.cross_size = now.cross_rank, now.cross_size

    @property
    def world_ranks(self) -> Sequence[int]:
        return self._members

    @property
    def patience(self) -> float:
        return 2 * self._limit + _GRACE_SECONDS

    @property
    def server_numbers(self) -> Sequence[int]:
        return range(self._workers, self._workers + self.servers)

    @property
    def workers(self) -> int:
        return self._workers if self.serves else self.size

    # -- units --------------------------------------------------------------------------------------------------------

    def complete(self, work: Callable[[], T]) -> T:
        with self._lock:
            if self._inside or self.waits:
                return work()
            self._inside = True
            try:
                return self._run(work)
            finally:
                self._inside = False

    def _run(self, work: Callable[[], T]) -> T:
        """Run the protocol."""
        results: list[T] = []
        before, failed_at, in_vain, answer = self._members, 0.0, 0, True
        steps = protocol()
        step = next(steps)
        while True:
            if step is Step.WORK:
                results.clear()
                answer = self._attempt(lambda: results.append(work()))
            elif step is Step.AGREE:
                answer = self._agree(self._mpi_group, answer)
                failed_at = failed_at or (0.0 if answer else time.monotonic())
            elif step is Step.REVOKE:
                self._mpi_group.Revoke()
            elif step is Step.SHRINK:
                in_vain = 0 if self._shrink() else in_vain + 1
                self._check(in_vain)
            elif step is Step.JOIN:
                answer = self._attempt(self._join)
            try:
                step = steps.send(answer)
            except StopIteration:
                break
        self._units += 1
        if failed_at:
            self._note(before, time.monotonic() - failed_at)
        return results[0]

    @property
    def _mpi_group(self) -> "MPI.Comm":
        assert self._group is not None
        return self._group

    def _attempt(self, work: Callable[[], object]) -> bool:
        """Run work; return False if it failed because a rank died or hangs, or another rank has noticed this."""
        try:
            work()
        except (TimeoutError, self._mpi.Exception) as error:
            self._kept.append(error)
            return False
        return True

    def _agree(self, group: "MPI.Comm", mine: bool) -> bool:
        """Return whether all of a group said True and live; MPI gives all of them the same answer."""
        flag = np.array([int(mine)], np.intc)
        try:
            request = group.Iagree(flag)
            with waiting.recorded("an agreement"):
                ended = until(request.Test, self.patience)
        except self._mpi.Exception:
            return False
        if not ended:
            raise ExchangeError(
                f"a rank has not answered for {self.patience:.0f} s, and nobody ended it. Look at the last output of "
                f"each rank. {LIMIT_VARIABLE}=seconds sets the time limit."
            )
        return bool(flag[0])

    # -- recovery -----------------------------------------------------------------------------------------------------

    def _shrink(self) -> bool:
        """Form the group of the ranks that live; return whether it is smaller."""
        old = self._mpi_group.Get_group()
        # Not `Ishrink`, which ends with an internal error in Open MPI 5.0.
        with waiting.recorded("a recovery"):
            group = self._mpi_group.Shrink()
        group.Set_errhandler(self._mpi.ERRORS_RETURN)
        left = group.Get_group()
        places = self._mpi.Group.Translate_ranks(left, list(range(left.Get_size())), old)
        died = len(places) < len(self._members)
        self._group, self._members = group, [self._members[place] for place in places]
        set_rank(group.Get_rank())
        failure.install(group.Get_rank(), group.Get_size(), survives=True)
        return died

    def _check(self, in_vain: int) -> None:
        """Raise an error, on all ranks, if they cannot go on."""
        left = len(self._members)
        if left < self._least:
            raise ExchangeError.on_all_ranks(
                f"{left} of {self._full} ranks are left, and {LEAST_VARIABLE} (--min-workers) is {self._least}. "
                "Do: start the job again after its last checkpoint (hvdx run --max-restarts)."
            )
        if in_vain == _IN_VAIN:
            error = self._kept[-1]
            text = f"an exchange failed {_IN_VAIN} times, and nobody died: {error}"
            raise ExchangeError.on_all_ranks(text) from error

    def _join(self) -> None:
        """Make the channel of the new group, and check that all ranks repeat the same unit."""
        assert isinstance(self._now, MpiComm)
        self._now = self._now.of_survivors(self._mpi_group, [self._hosts[rank] for rank in self._members])
        self.recoveries += 1
        self._take_places()
        self._share_cores()
        units = self._now.all_gather_object(self._units, "a recovery")
        if len(set(units)) > 1:
            raise ExchangeError.on_all_ranks(f"the ranks are in different exchanges after a death: {units}.")
        if self.rank == 0:
            _show_output()

    def _note(self, before: Sequence[int], seconds: float) -> None:
        """Keep a death, and tell the user of it."""
        ranks = [rank for rank in before if rank not in self._members]
        if ranks:
            self.deaths.append(Death(ranks, self.size, seconds))
        if self.rank:
            return
        if not ranks:
            error = self._kept[-1] if self._kept else "another rank saw an error"
            _log.warning(f"an exchange failed, and nobody died; it was repeated after {seconds:.2f} s ({error}).")
            return
        died = [f"rank {rank} on {self._hosts[rank]}" for rank in ranks]
        head, its = f"{' and '.join(died)} {'has' if len(died) == 1 else 'have'}", "its" if len(died) == 1 else "their"
        _log.warning(
            f"{head} died; {self.size} of {self._full} ranks train on after {seconds:.3f} s. Lost: {its} updates that "
            f"were not exchanged (residual, own steps) and, without global_batch_size, the rest of {its} samples in "
            "this epoch."
        )

    # -- spares -------------------------------------------------------------------------------------------------------

    def can_admit(self, place: int) -> bool:
        beside = self._spares
        if beside is None or self.size == self._full:
            return False
        return self.complete(
            lambda: self._now.all_gather_object(self.rank == 0 and beside.are_ready(place), "the spares")[0]
        )

    def admit(self) -> None:
        with self._lock:
            self._regroup()

    def wait(self, place: int) -> bool:
        assert self._spares is not None
        while self.waits:
            if not self._spares.wait(place):
                supervision.report("spare", rank=self._members[-1])
                return False
            self._regroup()
        return True

    def _regroup(self) -> None:
        """Let spares take the places that are free, by the steps of `protocol` among all who live."""
        beside = self._spares
        assert beside is not None
        begin, formed = time.monotonic(), list[spares.Group | None]()
        steps, answer = protocol(), False
        step = next(steps)
        while True:
            if step is Step.WORK:
                answer = bool(formed)
            elif step is Step.AGREE:
                answer = self._agree(beside.world, answer)
            elif step is Step.REVOKE:
                beside.world.Revoke()
            elif step is Step.SHRINK:
                beside.shrink()
            elif step is Step.JOIN:
                formed.clear()
                try:
                    formed.append(beside.form(self.waits, self._units))
                except self._mpi.Exception as error:
                    self._kept.append(error)
                answer = bool(formed)
            try:
                step = steps.send(answer)
            except StopIteration:
                break
        if formed[0] is not None:
            self._enter(formed[0], time.monotonic() - begin)

    def _enter(self, formed: spares.Group, seconds: float) -> None:
        self._now, self._group, self._members = formed.comm, formed.comm.group, formed.members
        self._units, self.waits = formed.units, False
        self.recoveries += 1
        self._take_places()
        self._share_cores()
        set_rank(self.rank)
        failure.install(self.rank, self.size, survives=True)
        if self.rank == 0 and formed.newcomers:
            who = " and ".join(f"spare {number} on {self._hosts[number]}" for number in formed.newcomers)
            verb = "has joined" if len(formed.newcomers) == 1 else "have joined"
            _log.info(f"{who} {verb} after {seconds:.3f} s; {self.size} of {self._full} ranks train on.")

    # -- ranks that hang ----------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        """End the wait of this rank if another one has seen a death."""
        if self._is_revoked():
            raise self._mpi.Exception(self._mpi.ERR_REVOKED)

    def _is_revoked(self) -> bool:
        groups = self._group, None if self._spares is None else self._spares.world
        return any(group is not None and group.Is_revoked() for group in groups)

    def _is_awaited(self) -> bool:
        """Return whether the others want to recover; called by the thread of `Heartbeat`."""
        with contextlib.suppress(self._mpi.Exception):
            # A probe makes MPI process the messages that have arrived.
            self._mpi_group.Iprobe(self._mpi.ANY_SOURCE, _NO_TAG)
        return self._is_revoked()

    def _name_if_mortal(self) -> str:
        """Return a name of this rank if others could go on without it."""
        mortal = self._now.size > 1 and not self.waits and not self.serves
        return f"rank {self._members[self._now.rank]}" if mortal else ""

    # -- collectives --------------------------------------------------------------------------------------------------

    def all_gather_object(self, value: T, what: str) -> list[T]:
        return self.complete(lambda: self._now.all_gather_object(value, what))

    def all_reduce_sum(self, vector: np.ndarray, what: str) -> np.ndarray:
        return self.complete(lambda: self._now.all_reduce_sum(vector, what))

    def broadcast(self, tensors: Sequence[npt.ArrayLike], root: int, what: str) -> Sequence[npt.ArrayLike]:
        """Send the tensors of the root to every rank; if the root dies, those of the present rank 0."""
        sender = self._members[root]

        def work() -> list[np.ndarray]:
            there = self._members.index(sender) if sender in self._members else 0
            return self._now.broadcast(tensors, there, what)

        return self.complete(work)

    def channel(self, what: str) -> Channel:
        return SurvivingChannel(self, what, lambda: self._now)

    def divide(self, part: int, key: int, what: str) -> Comm:
        """Return a communicator for use inside of `complete`: it does not survive a death by itself."""
        return self.complete(lambda: self._now.divide(part, key, what))

    def mailbox(self, box: int, buffer_for: BufferFor | None = None) -> Mailbox:
        """Open a mailbox, which names ranks by their numbers in `world_ranks`; see `Mailbox.gone`.

        Raises:
            ConfigError: if there are spares.
        """
        self._refuse_spares(self._spares is not None)
        if self._mail is None:
            # Not `Dup`, in which Open MPI may crash if a rank dies meanwhile.
            self._mail = self.complete(lambda: self._make_mail(self._mpi_group.Shrink(), self._members))
        group, mortals = self._mail
        return MpiMailbox(group, box, buffer_for, mortals)

    def _refuse_spares(self, there: object) -> None:
        if there:
            raise ConfigError.on_all_ranks(
                "--spares: expected a strategy without messages between single ranks, which a spare could not join. "
                "Do: --max-restarts N in place of --spares."
            )

    def _make_mail(self, group: "MPI.Comm", numbers: Sequence[int]) -> "tuple[MPI.Comm, Mortals]":
        if group.Get_size() < len(numbers):
            raise self._mpi.Exception(self._mpi.ERR_PROC_FAILED)
        group.Set_errhandler(self._mpi.ERRORS_RETURN)
        return group, Mortals(group, numbers)

    def close(self) -> None:
        self._now.close()


class SurvivingChannel(Channel):
    """Channel whose exchanges are units of a `SurvivingComm`.

    `scatter_pieces`, `gather_pieces`, `all_to_all` and `share` depend on the number of ranks: call them in a
    larger unit.

    Args:
        comm: the ranks.
        what: content of the channel, for error messages.
        now: function that returns the communicator of the ranks that are left.
    """

    rank, size = of_comm("rank"), of_comm("size")

    def __init__(self, comm: SurvivingComm, what: str, now: Callable[[], Comm]):
        self._comm, self._what, self._now = comm, what, now
        self._made: tuple[int, Channel | None] = (-1, None)

    @property
    def _channel(self) -> Channel:
        """The channel of the ranks that are left. The first use after a death is collective."""
        number, channel = self._made
        if channel is None or number != self._comm.recoveries:
            channel = self._now().channel(self._what)
            self._made = self._comm.recoveries, channel
        return channel

    def exchange(self, header: Sequence[int], message: np.ndarray | None = None) -> Received:
        return self._comm.complete(lambda: self._channel.exchange(header, message))

    def all_reduce(self, vector: np.ndarray) -> None:
        self._replace(vector, lambda total: self._channel.all_reduce(total))

    def sum_in_order(self, vector: np.ndarray, scale: float = 1.0, cast: Cast = np.ndarray.astype) -> None:
        self._replace(vector, lambda total: self._channel.sum_in_order(total, scale, cast))

    def _replace(self, vector: np.ndarray, add: Callable[[np.ndarray], None]) -> None:
        """Replace a vector by a sum; after a death it is needed once more."""

        def work() -> np.ndarray:
            total = vector.copy()
            add(total)
            return total

        vector[:] = self._comm.complete(work)

    def scatter_pieces(self, vector: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        return self._comm.complete(lambda: self._channel.scatter_pieces(vector, bounds))

    def gather_pieces(self, piece: np.ndarray, bounds: np.ndarray, into: np.ndarray) -> None:
        self._comm.complete(lambda: self._channel.gather_pieces(piece, bounds, into))

    def share(self, elements: int) -> list[np.ndarray] | None:
        return self._comm.complete(lambda: self._channel.share(elements))

    def all_to_all_rows(self, numbers: np.ndarray) -> np.ndarray:
        return self._comm.complete(lambda: self._channel.all_to_all_rows(numbers))

    def all_to_all(self, parts: Sequence[np.ndarray], sizes: Sequence[int]) -> list[np.ndarray]:
        return self._comm.complete(lambda: self._channel.all_to_all(parts, sizes))

    def close(self) -> None:
        """Do nothing: after a death, the ranks may not free a channel together."""


def _least_ranks(size: int) -> int:
    text = os.environ.get(LEAST_VARIABLE, "") or "1"
    if not text.isdigit() or not 1 <= int(text) <= size:
        raise ConfigError.on_all_ranks(f"{LEAST_VARIABLE}: expected 1 to {size}, the number of ranks, got {text!r}.")
    return int(text)


def _show_output() -> None:
    """Show the standard output of this process, which `hvdx run` has hidden."""
    number = os.environ.pop(OUTPUT_VARIABLE, "")
    if number:
        sys.stdout.flush()
        os.dup2(int(number), 1)
