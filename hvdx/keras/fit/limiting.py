"""The end of a fit at its limit."""

from hvdx.comm import Comm
from hvdx.errors import ConfigError
from hvdx.keras.fit import limits
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.fit.costs import Costs
from hvdx.keras.fit.counting import Counting
from hvdx.keras.fit.limits import Limit
from hvdx.keras.fit.part import Part
from hvdx.keras.fit.record import Record
from hvdx.keras.types import Logs
from hvdx.log import Log

_log = Log(__name__)


class Limiting(Part):
    """End the fit after an epoch, or the process after a step.

    Raises:
        ConfigError: if the limit is a number of steps, which asynchronous workers do not take together.
    """

    alone = True

    def __init__(
        self, comm: Comm, limit: Limit, counting: Counting, attachment: Attachment, costs: Costs, record: Record
    ):
        super().__init__()
        if attachment.strategy.asynchronous and limit.steps and comm.size > 1:
            raise ConfigError(
                f"{limits.VARIABLE}={limit.text}: expected epochs or minutes under {attachment.strategy!r}, "
                "whose workers take different numbers of steps. Set another limit, or train with one worker."
            )
        self._comm, self._limit, self._counting = comm, limit, counting
        self._attachment, self._costs, self._record = attachment, costs, record

    def on_train_begin(self, logs: Logs = None) -> None:
        self._limit.begin()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """End this process after the steps of the limit, as all ranks do after the same step. Collective then."""
        steps = self._counting.steps_of_fit
        if not self._limit.after_step(steps):
            return
        self._counting.end_steps()
        self._attachment.end_steps()
        self._limit.reach()
        self._costs.finish()
        self._record.end("limit")
        self._say(f"the process ends after {steps} steps")
        raise SystemExit(0)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """End the fit if the limit of rank 0 is reached. Collective if there is a limit."""
        over = self._limit.after_epoch()
        if self._limit.text and self._comm.all_gather_object(over, "the limit of the fit")[0]:
            self._limit.reach()
            self.model.stop_training = True
            if not self._counting.ended:
                self._say(f"the fit ends after epoch {epoch + 1}")

    def _say(self, what: str) -> None:
        if self._comm.rank == 0:
            _log.info(f"{limits.VARIABLE}={self._limit.text}: {what}.", head="\nhvdx: ")
