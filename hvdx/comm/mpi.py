"""Communicator and channels on MPI (mpi4py), for exchanges on the host.

Collectives are non-blocking and polled with back-off, so a waiting rank leaves its core to other ranks. Every wait has
a time limit.
"""

import copy
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hvdx.comm import launcher, memory, mesh, progress, watchdog
from hvdx.comm.interfaces import BufferFor, Cast, Channel, Comm, Mailbox, Received, T, add_in_order, place_of
from hvdx.comm.launcher import Launch
from hvdx.comm.mpi_mailbox import MpiMailbox
from hvdx.comm.sums import BlockSum
from hvdx.comm.waiting import LIMIT_VARIABLE, time_limit, until, wait_for_all
from hvdx.errors import ExchangeError, LaunchError

if TYPE_CHECKING:
    from mpi4py import MPI

# Time limit of the exchange in which the ranks that timed out find the missing ranks.
_SEARCH_SECONDS = 2.0
_ABSENT_TAG = 7
# Maximum number of missing ranks whose position an error reports.
_MAX_REPORTED = 4
# Open MPI over TCP imitates PUT for large messages: the receiver asks for each piece, and its requests wait behind the
# data that it sends itself. If both ends send, that takes up to twice the time. These are its other default flags.
_TCP_FLAGS, _WITHOUT_PUT = "OMPI_MCA_btl_tcp_flags", "send,inplace,need-ack,need-csum,hetero-rdma"
# MPI counts bytes in a C int.
_MAX_BYTES = 2**31 - 1


def initialise() -> int:
    """Start MPI with full thread support and return the size of its world.

    Importing mpi4py starts MPI with MPI_THREAD_MULTIPLE. Horovod needs it because it calls MPI from its own thread; if
    Horovod started MPI, the level would depend on its build.
    """
    os.environ.setdefault(_TCP_FLAGS, _WITHOUT_PUT)
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_size()


def all_reduce_seconds(elements: int, times: int = 2) -> float:
    """Return the seconds of MPI's blocking all-reduce, which Horovod calls, on the slowest rank. Collective, no limit.

    Args:
        elements: number of float32 elements.
        times: repetitions, of which the fastest counts.
    """
    initialise()
    from mpi4py import MPI

    vector, taken = np.ones(elements, np.float32), []
    for _ in range(times):
        MPI.COMM_WORLD.Barrier()
        begin = time.perf_counter()
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, vector)
        taken.append(MPI.COMM_WORLD.allreduce(time.perf_counter() - begin, MPI.MAX))
    return min(taken)


def abort(code: int) -> None:
    """End every process of the job now if this process has started MPI; otherwise return.

    Args:
        code: exit status, 1 to 255.
    """
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not module.Is_finalized():
        module.COMM_WORLD.Abort(code)


def check_size(who: str, found: int, launch: Launch) -> None:
    """Raise LaunchError if a library's world size differs from the launcher's.

    Args:
        who: name of the library, "MPI" or "Horovod".
        found: the library's world size.
        launch: rank and size from the launcher.
    """
    if found != launch.size:
        why = (
            "the launcher belongs to another MPI. Use the mpirun of the MPI that mpi4py and Horovod were built with; "
            "hvdx doctor shows which."
        )
        if launch.launcher == "Slurm":
            why = (
                "srun did not tell it about the other ranks. Do: srun --mpi=pmix (srun --mpi=list shows the plugins; "
                "hvdx doctor --batch tries them), or mpirun inside the job."
            )
        raise LaunchError(
            f"{launch.launcher} started {launch.size} ranks and {who} finds a world of {found} on rank "
            f"{launch.rank}: {why}"
        )


class MpiComm(Comm):
    """Communicator of a process that an MPI launcher started.

    Args:
        launch: rank and size from the launcher; checked against MPI.
        servers: number of server ranks, taken from the end of the world. On them this is the communicator of the
            servers.
        split: number of ranks that split a layer, or "node"; see `hvdx.comm.mesh`.
        watched: whether a watchdog looks for ranks that make no progress.
        alive: function that every wait calls again and again; it raises an error to end the wait. Channels then have
            no communicators of their own, since Open MPI may crash if a rank dies while it makes one: the ranks run the
            exchanges of all channels in one order.

    Raises:
        LaunchError: if MPI's world differs from the launcher's, MPI lacks MPI_THREAD_MULTIPLE, or ranks were given
            different `servers` or `split`.
        ExchangeError: if ranks do not join within the time limit.
        ConfigError: if `HVDX_STALL_WARNING` is not a number of seconds.

    Attributes:
        group: `MPI.Comm` of the ranks in this communicator.
        mailbox_group: `MPI.Comm` of the mailboxes, to which servers belong too; None before the first mailbox.
    """

    def __init__(
        self,
        launch: Launch,
        servers: int = 0,
        split: int | str = 1,
        watched: bool = True,
        alive: Callable[[], None] | None = None,
    ):
        check_size("MPI", initialise(), launch)
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise LaunchError(
                "MPI was started without MPI_THREAD_MULTIPLE, and hvdx calls it from several threads. Import hvdx "
                "before whatever starts MPI, or use an MPI that has it."
            )
        everyone = MPI.COMM_WORLD
        stall = _agree(everyone, servers, split, watchdog.stall_limit() if watched else 0.0)
        self._watchdog = watchdog.Watchdog(everyone, stall) if stall else None
        self.servers, self.serves = servers, everyone.Get_rank() >= everyone.Get_size() - servers
        progress.serve(self.serves)
        self._workers = everyone.Get_size() - servers
        self.mailbox_group: MPI.Comm | None = everyone.Dup() if servers else None
        self.group = everyone.Split(int(self.serves), everyone.Get_rank()) if servers else everyone
        self._alive = alive
        self._channel = MpiChannel(self.group, "a collective", alive=alive)
        self._flags: Channel | None = None
        self.rank, self.size = self._channel.rank, self._channel.size
        self.library = MPI.Get_library_version().strip("\0 \n").splitlines()[0].partition(",")[0]
        places = self.all_gather_object((MPI.Get_processor_name(), launcher.core_mask()), "places")
        self.hosts = here = [host for host, _ in places]
        mine = [rank for rank, host in enumerate(here) if host == here[self.rank]]
        launcher.set_fair_cores(launcher.fair_cores([places[rank][1] for rank in mine], mine.index(self.rank)))
        known = launch.local_rank is not None and launch.local_size is not None and not servers
        self.local_rank = launch.local_rank if known else mine.index(self.rank)  # type: ignore[assignment]
        self.local_size = launch.local_size if known else len(mine)  # type: ignore[assignment]
        peers = [rank for rank, other in enumerate(self.all_gather_object(self.local_rank, "places")) if
                 other == self.local_rank]  # fmt: skip
        self.cross_rank, self.cross_size = peers.index(self.rank), len(peers)
        self.mesh = None if self.serves else mesh.make(self, split)

    @property
    def workers(self) -> int:
        return self._workers

    def all_gather_object(self, value: T, what: str) -> list[T]:
        message = np.frombuffer(pickle.dumps(value), np.uint8)
        # Unpickling is safe: the bytes come from ranks of this job, which run the same user's code.
        return [pickle.loads(m.tobytes()) for m in self._channel.named(what).exchange([], message).messages]

    def all_reduce_sum(self, vector: np.ndarray, what: str) -> np.ndarray:
        total = np.array(vector, np.float64)
        self._channel.named(what).all_reduce(total)
        return total

    def broadcast(self, tensors: Sequence[npt.ArrayLike], root: int, what: str) -> list[np.ndarray]:
        channel, result = self._channel.named(what), []
        for tensor in tensors:
            array = np.asarray(tensor, order="C")
            if self.rank != root:
                array = memory.aligned(array.size, array.dtype).reshape(array.shape)
            channel.broadcast(array.reshape(-1).view(np.uint8), root)
            result.append(array)
        return result

    def channel(self, what: str) -> Channel:
        return MpiChannel(self.group, what, self.parent_ranks, self._alive)

    def of_survivors(self, group: "MPI.Comm", hosts: Sequence[str]) -> "MpiComm":
        """Return a communicator of the ranks that are left. Collective over them."""
        some = copy.copy(self)
        some.group, some.hosts = group, hosts
        some._channel = MpiChannel(group, "a collective", alive=self._alive)
        some.rank, some.size = some._channel.rank, some._channel.size
        some._workers, some._flags, some.mailbox_group = some.size, None, None
        some.local_rank, some.local_size, some.cross_rank, some.cross_size = place_of(hosts, some.rank)
        return some

    def divide(self, part: int, key: int, what: str) -> "MpiComm":
        some = copy.copy(self)
        numbers = self.all_gather_object((part, key, self.rank), what)
        some.parent, some.parent_ranks = self, [rank for other, _, rank in sorted(numbers) if other == part]
        some.group = self.group.Split(part, key)
        some._channel = MpiChannel(some.group, what, some.parent_ranks, self._alive)
        some.rank, some.size = some._channel.rank, some._channel.size
        some.hosts = [self.hosts[rank] for rank in some.parent_ranks]
        some.servers, some._workers = 0, some.size
        some.mailbox_group = some._flags = some._watchdog = some.mesh = None
        return some

    def mailbox(self, box: int, buffer_for: BufferFor | None = None) -> Mailbox:
        if self.mailbox_group is None:
            group, request = self.group.Idup()
            self.mailbox_group = group
            wait_for_all(request.Test, "opening a mailbox")
        return MpiMailbox(self.mailbox_group, box, buffer_for)

    def any_true(self, mine: bool) -> bool:
        if self._flags is None:
            self._flags = self.channel("a flag")
        return bool(self._flags.exchange([int(mine)]).headers.any())

    def close(self) -> None:
        if self.mesh is not None:
            self.mesh.close()
        self._channel.close()
        if self.parent is not None:
            return
        launcher.set_fair_cores(None)
        if self._watchdog is not None:
            self._watchdog.stop()


def _agree(everyone: "MPI.Comm", servers: int, split: int | str, stall: float) -> float:
    """Check that all ranks have the same servers and split; otherwise they would form different groups and deadlock.

    Returns:
        Rank 0's `stall`, in seconds. All ranks use it, because a stall warning asks all ranks.
    """
    gathered = np.empty((everyone.Get_size(), 3), np.float64)
    mine = np.array([servers, stall, -1 if split == mesh.NODE else split], np.float64)
    wait_for_all(everyone.Iallgather(mine, gathered).Test, "joining the world")
    first, *_ = numbers = gathered[:, 0].astype(int).tolist()
    for rank, others in enumerate(numbers):
        if others != first:
            raise LaunchError.on_all_ranks(
                f"the ranks were given different strategies: rank 0 has one with {first} server ranks, rank {rank} one "
                f"with {others}. Give every rank the same strategy; HVDX_STRATEGY has to reach all hosts "
                "(mpirun -x HVDX_STRATEGY)."
            )
    splits = [mesh.NODE if value < 0 else str(int(value)) for value in gathered[:, 2].tolist()]
    for rank, theirs in enumerate(splits):
        if theirs != splits[0]:
            raise LaunchError.on_all_ranks(
                f"the ranks were given different splits: split={splits[0]} on rank 0, split={theirs} on rank {rank}. "
                f"Give every rank the same; {mesh.VARIABLE} has to reach all hosts (mpirun -x {mesh.VARIABLE})."
            )
    return float(gathered[0, 1])


class MpiChannel(Channel):
    """Channel on its own MPI communicator, so that its messages do not mix with those of other threads.

    Args:
        parent: `MPI.Comm`; it is duplicated, which is collective.
        what: content of the channel, for error messages.
        ranks: number in the world of each rank of the channel, for error messages; None if they are the same.
        alive: see `MpiComm`.
    """

    def __init__(
        self,
        parent: "MPI.Comm",
        what: str,
        ranks: Sequence[int] | None = None,
        alive: Callable[[], None] | None = None,
    ):
        from mpi4py import MPI

        self._mpi, self._what, self._limit, self._alive = MPI, what, time_limit(), alive
        self.rank, self.size = parent.Get_rank(), parent.Get_size()
        self._ranks = range(self.size) if ranks is None else ranks
        self._buffer = np.empty(0, np.uint8)
        # `_wait` needs a communicator to find missing ranks, so it has the parent's until the duplicate exists.
        self._comm = parent
        if alive is None:
            fresh, request = parent.Idup()
            self._wait(request)
            self._comm = fresh

    def named(self, what: str) -> "MpiChannel":
        """Set the name of the next exchange and return this channel."""
        self._what = what
        return self

    def exchange(self, header: Sequence[int], message: np.ndarray | None = None) -> Received:
        begin = time.perf_counter()
        mine = np.array([*header, 0 if message is None else message.size], np.int64)
        headers = np.empty((self.size, mine.size), np.int64)
        self._wait(self._comm.Iallgather(mine, headers))
        arrived = time.perf_counter()
        messages = [] if message is None else self._gather(message, headers[:, -1])
        return Received(headers[:, :-1], messages, arrived - begin, time.perf_counter() - arrived)

    def _gather(self, message: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
        ends = np.cumsum(sizes)
        if ends[-1] > _MAX_BYTES:
            raise ExchangeError(
                f"{self._what}: expected at most {_MAX_BYTES} bytes in one exchange, got {ends[-1]} from {self.size} "
                "ranks. Send less: a lower density, a larger tau, or embeddings by AllReduce(sparse='dense')."
            )
        self._reserve(ends[-1])
        into = [self._buffer, sizes, ends - sizes, self._mpi.BYTE]
        received = [self._buffer[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        self._wait(self._comm.Iallgatherv([message, self._mpi.BYTE], into))
        return received

    def _reserve(self, size: int) -> None:
        """Enlarge the buffer to at least `size` bytes."""
        if self._buffer.size < size:
            self._buffer = np.empty(size + size // 4, np.uint8)

    def all_reduce(self, vector: np.ndarray) -> None:
        self._wait(self._comm.Iallreduce(self._mpi.IN_PLACE, vector))

    def sum_in_order(
        self,
        vector: np.ndarray,
        scale: float = 1.0,
        cast: Cast = np.ndarray.astype,
    ) -> None:
        """Sum a vector in blocks, with one flow a link; see `Channel.sum_in_order` and `hvdx.comm.sums`.

        The time limit begins anew when a block has been sent or received.
        """
        if self.size == 1:
            add_in_order([vector], vector, scale, cast)
            return
        blocks = BlockSum(self._comm, vector, scale, cast)
        while not blocks.done:
            self._wait_for(blocks.advance)

    def scatter_pieces(self, vector: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        ends = bounds * vector.itemsize
        mine = ends[self.rank + 1] - ends[self.rank]
        self._reserve(self.size * mine)
        got = self._buffer[: self.size * mine]
        sent = [vector.view(np.uint8), np.diff(ends), ends[:-1], self._mpi.BYTE]
        into = [got, np.full(self.size, mine), np.arange(self.size) * mine, self._mpi.BYTE]
        self._wait(self._comm.Ialltoallv(sent, into))
        return got.view(vector.dtype).reshape(self.size, bounds[self.rank + 1] - bounds[self.rank])

    def gather_pieces(self, piece: np.ndarray, bounds: np.ndarray, into: np.ndarray) -> None:
        ends = bounds * into.itemsize
        received = [into.view(np.uint8), np.diff(ends), ends[:-1], self._mpi.BYTE]
        self._wait(self._comm.Iallgatherv([piece.view(np.uint8), self._mpi.BYTE], received))

    def share(self, elements: int) -> list[np.ndarray] | None:
        return memory.share(self, elements, f"rank {self._ranks[self.rank]}")

    def all_to_all_rows(self, numbers: np.ndarray) -> np.ndarray:
        got = np.empty_like(numbers)
        self._wait(self._comm.Ialltoall(numbers, got))
        return got

    def all_to_all(self, parts: Sequence[np.ndarray], sizes: Sequence[int]) -> list[np.ndarray]:
        ends, sent = np.cumsum(sizes), np.array([part.size for part in parts])
        if max(ends[-1], sent.sum()) > _MAX_BYTES:
            raise ExchangeError(
                f"{self._what}: expected at most {_MAX_BYTES} bytes in one exchange, got {max(ends[-1], sent.sum())} "
                f"on rank {self._ranks[self.rank]}. Send less: a smaller batch, or more ranks in a group."
            )
        self._reserve(ends[-1])
        out = [np.concatenate(parts), sent, np.cumsum(sent) - sent, self._mpi.BYTE]
        self._wait(self._comm.Ialltoallv(out, [self._buffer, sizes, ends - sizes, self._mpi.BYTE]))
        return np.split(self._buffer[: ends[-1]], ends[:-1])

    def broadcast(self, data: np.ndarray, root: int) -> None:
        """Overwrite `data`, uint8[n], with the data of the root."""
        for begin in range(0, data.size, _MAX_BYTES):
            self._wait(self._comm.Ibcast([data[begin : begin + _MAX_BYTES], self._mpi.BYTE], root))

    def close(self) -> None:
        if self._alive is None and not self._mpi.Is_finalized():
            self._comm.Free()

    def _wait(self, request: "MPI.Request") -> None:
        """Wait until the request is done; raise ExchangeError after the time limit."""
        self._wait_for(request.Test)

    def _wait_for(self, done: Callable[[], bool]) -> None:
        """Poll until done; raise ExchangeError after the time limit, or TimeoutError if `alive` was given."""
        alive = self._alive

        def done_or_over() -> bool:
            assert alive is not None
            alive()
            return done()

        finished = until(done if alive is None else done_or_over, self._limit, self._what)
        if not finished and alive is not None:
            raise TimeoutError(f"{self._what}: waited {self._limit:.0f} s ({LIMIT_VARIABLE}).")
        if not finished:
            raise ExchangeError(
                f"{self._what}: waited {self._limit:.0f} s on rank {self._ranks[self.rank]} of {self.size}. "
                f"{self._describe_missing()} Look at the last output of that rank. {LIMIT_VARIABLE}=seconds sets "
                "the time limit."
            )

    def _describe_missing(self) -> str:
        """Describe the missing ranks: those that do not take part in an exchange among the ranks that timed out."""
        watchdog.ask()
        here, others = {self.rank}, [r for r in range(self.size) if r != self.rank]
        sent = [self._comm.Isend([np.zeros(1, np.uint8), self._mpi.BYTE], r, _ABSENT_TAG) for r in others]
        answers = {r: self._comm.Irecv([np.zeros(1, np.uint8), self._mpi.BYTE], r, _ABSENT_TAG) for r in others}

        def all_answered() -> bool:
            here.update(r for r in others if r not in here and answers[r].Test())
            return len(here) == self.size

        until(all_answered, _SEARCH_SECONDS)
        for request in sent:
            request.Test()
        missing = [self._ranks[r] for r in sorted(set(range(self.size)) - here)]
        if not missing:
            return "All ranks were waiting: the network lost a message, or they were in different exchanges."
        said = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} did not join."
        # The watchdog expects ranks of the world. The channel's ranks equal those, except on server ranks.
        reports = "; ".join(filter(None, map(watchdog.last_report, missing[:_MAX_REPORTED])))
        return f"{said} Last known: {reports}." if reports else said
