"""Worker's side of the step dispenser: the next step of an epoch goes to the worker that requests it first."""

from hvdx.comm import Comm
from hvdx.strategies.serving.client import client_of
from hvdx.strategies.serving.messages import MessageType


class StepClient:
    """Client that requests the steps of an epoch from the first server. Creating it is collective.

    Args:
        comm: the workers.
        server: rank of the first server.
        steps: steps in an epoch, of all workers together; each worker takes its first step without a request.
        begun: steps of the first epoch that were taken before this fit.

    Attributes:
        taken: steps of this epoch that workers had taken or begun at this worker's last request.
        over: whether this worker's last request was refused, so that the epoch is over for it.
        stopped: whether a worker ended the epoch early.
    """

    def __init__(self, comm: Comm, server: int, steps: int, begun: int = 0):
        self._workers, self.steps, self.taken, self.over, self.stopped = comm.size, steps, 0, False, False
        self._before, self._begun = 0, begun
        self._client, self._server = client_of(comm), server
        self._client.register_servers([self._server])
        # Rounds may differ: an exception may have ended a fit on some workers before they began an epoch.
        self._client.round = max(comm.all_gather_object(self._client.round, "the round"))
        if comm.rank == self._server:
            self._client.open_server()

    def begin(self) -> None:
        """Begin an epoch, on all workers."""
        self._client.round += 1
        self._before, self._begun = self._begun, 0
        self.taken, self.over, self.stopped = self._before, False, False

    def another(self, stop: bool = False) -> bool:
        """Request another step; return whether this worker may take it.

        Args:
            stop: end the epoch for all workers.

        Raises:
            ExchangeError: if there was no answer within the time limit.
        """
        session = -1
        # The first step of each worker needs no request. If fewer steps than workers remain, none is left to request.
        left = max(self.steps - self._before - self._workers, 0)
        header = [MessageType.STEP, session, self._client.round, left, int(stop)]
        answer = self._client.call([(self._server, header, None)], MessageType.GRANT)[session]
        granted, given, stopped = answer.header[2:5]
        self.taken, self.over, self.stopped = self._before + self._workers + given, not granted, bool(stopped)
        return bool(granted)
