"""A worker's side of the dispenser: whoever is ready takes the next step of an epoch."""

from hvdx.comm import Comm
from hvdx.strategies.serving.client import client_of
from hvdx.strategies.serving.messages import MessageType


class StepClient:
    """The steps of an epoch, dealt out by the first server. Collective.

    Args:
        comm: the workers.
        server: the rank that deals them out.
        steps: in an epoch, of all workers together; each takes its first without asking.
        begun: so many of the first epoch's were taken before.

    Attributes:
        taken: steps of this epoch that workers have taken or begun, when this one asked last.
        over: whether it heard that no more are dealt out.
        stopped: whether that is because a worker wanted it so.
    """

    def __init__(self, comm: Comm, server: int, steps: int, begun: int = 0):
        self._workers, self.steps, self.taken, self.over, self.stopped = comm.size, steps, 0, False, False
        self._before, self._begun = 0, begun
        self._client, self._server = client_of(comm), server
        self._client.register_servers([self._server])
        # An exception may have ended a fit on some workers before it had begun an epoch.
        self._client.round = max(comm.all_gather_object(self._client.round, "the round"))
        if comm.rank == self._server:
            self._client.open_server()

    def begin(self) -> None:
        """An epoch begins, on all workers."""
        self._client.round += 1
        self._before, self._begun = self._begun, 0
        self.taken, self.over, self.stopped = self._before, False, False

    def another(self, stop: bool = False) -> bool:
        """Whether this worker is to take another step. Waits for the server's answer, and for nobody else.

        Args:
            stop: have nobody take another.

        Raises:
            ExchangeError: there was none within the time limit.
        """
        session = -1
        # Of the last few, the first steps that nobody asks for may be more than there are.
        left = max(self.steps - self._before - self._workers, 0)
        header = [MessageType.STEP, session, self._client.round, left, int(stop)]
        granted, given, stopped = self._client.call([(self._server, header, None)], MessageType.GRANT)[session].header[
            2:5
        ]
        self.taken, self.over, self.stopped = self._before + self._workers + given, not granted, bool(stopped)
        return bool(granted)
