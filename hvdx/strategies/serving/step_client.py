"""Worker's side of the step dispenser: the next step of an epoch goes to the worker that requests it first."""

from collections.abc import Mapping, Set

from hvdx.comm import Comm, Message
from hvdx.strategies.serving.client import Call, client_of
from hvdx.strategies.serving.messages import MessageType


class StepClient:
    """Client that requests the steps of an epoch from the first server. Creating it is collective.

    Workers that split layers take their steps together. So the first worker of each group requests them, each for all
    workers of its group. The counts are steps of workers, whether they form groups or not.

    Args:
        comm: the workers.
        server: number in mailboxes of the first server.
        steps: steps in an epoch, of all workers together; each worker takes its first step without a request.
        begun: steps of the first epoch that were taken before this fit. If fewer than `comm.size` are left, each worker
            takes one nevertheless.

    Attributes:
        taken: steps of this epoch that workers had taken or begun at this worker's last request.
        over: whether this worker's last request was refused, so that the epoch is over for it.
        stopped: whether a worker ended the epoch early.
    """

    def __init__(self, comm: Comm, server: int, steps: int, begun: int = 0):
        self._comm, self._group = comm, None if comm.mesh is None else comm.mesh.group
        self._together = 1 if self._group is None else self._group.size
        # From here on a group counts as one worker.
        self._workers, self._steps = comm.size // self._together, steps // self._together
        self.steps, self.taken, self.over, self.stopped = self._steps * self._together, 0, False, False
        self._before, self._begun = 0, begun // self._together
        self._client, self._server = client_of(comm), server
        self._client.register_servers([self._server])
        self._client.agree_on_round()
        # Any worker may take the place of a server that dies.
        if comm.survives or comm.world_ranks[comm.rank] == self._server:
            self._client.open_server()
        self._handed_out = 0

    def begin(self) -> None:
        """Begin an epoch, on all workers."""
        self._client.begin_round()
        # That of all ranks since their last exchange.
        self._workers = self._comm.size // self._together
        self._before, self._begun, self._handed_out = self._begun, 0, 0
        self.taken, self.over, self.stopped = self._before * self._together, False, False

    def request_step(self, stop: bool = False) -> bool:
        """Request another step; return whether this worker may take it. Collective in a group of workers.

        Args:
            stop: end the epoch for all workers.

        Raises:
            ExchangeError: if there was no answer within the time limit.
        """
        if self._group is None:
            granted, handed_out, stopped = self._ask(stop)
        else:
            stop = self._group.any_true(stop)
            mine = self._ask(stop) if self._group.rank == 0 else None
            answer = self._group.all_gather_object(mine, "the next step")[0]
            assert answer is not None  # that of rank 0, which asked
            granted, handed_out, stopped = answer
        self.taken = (self._before + self._workers + handed_out) * self._together
        self.over, self.stopped = not granted, stopped
        return granted

    def _ask(self, stop: bool) -> tuple[bool, int, bool]:
        """Return whether a step is granted, the number of steps handed out, and whether the epoch was stopped."""
        session = -1
        # The first step of each worker needs no request. If fewer steps than workers remain, none is left to request.
        left = max(self._steps - self._before - self._workers, 0)
        header = [MessageType.STEP, session, self._client.round, left, int(stop), self._handed_out]

        def ask_next(gone: Set[int], answers: Mapping[int, Message]) -> list[Call]:
            """Ask the next worker if the server has died."""
            if self._server not in gone:
                return []
            self._server = next(rank for rank in self._comm.world_ranks if rank not in gone)
            return [(self._server, header, None)]

        replace = ask_next if self._comm.survives else None
        answer = self._client.call([(self._server, header, None)], MessageType.GRANT, replace)[session]
        granted, self._handed_out, stopped = answer.header[2:5]
        return bool(granted), self._handed_out, bool(stopped)
