"""Worker's side of the step dispenser: the next step of an epoch goes to the worker that asks first."""

from hvdx.comm import Comm
from hvdx.strategies.serving.client import client_of
from hvdx.strategies.serving.messages import MessageType


class StepClient:
    """Steps of an epoch, handed out by the first server. Collective.

    Args:
        comm: the workers.
        server: rank that hands out the steps.
        steps: steps in an epoch, of all workers together; each takes its first without a request.
        begun: steps of the first epoch that were taken before.

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
        """Return whether this worker is to take another step. It waits for the server's answer only.

        Args:
            stop: end the epoch for all workers.

        Raises:
            ExchangeError: if there was no answer within the time limit.
        """
        session = -1
        # The workers' first steps need no request, and may be more than the steps that are left.
        left = max(self.steps - self._before - self._workers, 0)
        header = [MessageType.STEP, session, self._client.round, left, int(stop)]
        answer = self._client.call([(self._server, header, None)], MessageType.GRANT)[session]
        granted, given, stopped = answer.header[2:5]
        self.taken, self.over, self.stopped = self._before + self._workers + given, not granted, bool(stopped)
        return bool(granted)
