"""A worker's side of the turnstile: whoever is ready takes the next step of an epoch."""

from typing import TYPE_CHECKING

from hvdx.comm import Comm
from hvdx.strategies.serving.messages import Kind
from hvdx.strategies.serving.office import office_of

if TYPE_CHECKING:
    from hvdx.strategies.parameter_server import ParameterServer


class Tickets:
    """The steps of an epoch, dealt out by the first server. Collective.

    Args:
        strategy: knows the servers.
        comm: the workers.
        steps: in an epoch, of all workers together; each takes its first without asking.

    Attributes:
        taken: steps of this epoch that workers have taken or begun, when this one asked last.
        over: whether it heard that all are dealt out.
    """

    def __init__(self, strategy: "ParameterServer", comm: Comm, steps: int):
        self._workers, self.steps, self.taken, self.over = comm.size, steps, 0, False
        self._office, self._server = office_of(comm), strategy.server_ranks(comm)[0]
        self._office.know([self._server])
        # An exception may have ended a fit on some workers before it had begun an epoch.
        self._office.round = max(comm.all_gather_object(self._office.round, "the round"))
        if comm.rank == self._server:
            self._office.open_server()

    def begin(self) -> None:
        """An epoch begins, on all workers."""
        self._office.round += 1
        self.taken, self.over = 0, False

    def another(self) -> bool:
        """Whether this worker is to take another step. Waits for the server's answer, and for nobody else.

        Raises:
            ExchangeError: there was none within the time limit.
        """
        session = -1
        head = [Kind.TICKET, session, self._office.round, self.steps - self._workers]
        granted, given = self._office.call([(self._server, head, None)], Kind.ANSWER)[session].head[2:4]
        self.taken, self.over = self._workers + given, not granted
        return bool(granted)
