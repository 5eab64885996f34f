"""Costs of the exchanges: in the logs, in the counters, and in the table after a fit."""

from hvdx.comm import Comm
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.fit.counting import Counting
from hvdx.keras.fit.part import Part
from hvdx.keras.types import Logs
from hvdx.log import Log
from hvdx.report.counters import summary
from hvdx.strategies.telemetry import Telemetry, merged

_log = Log(__name__)


class Costs(Part):
    """Show what the exchanges of a fit cost."""

    alone = True

    def __init__(self, comm: Comm, counting: Counting, attachment: Attachment):
        super().__init__()
        self._comm, self._counting, self._attachment = comm, counting, attachment

    def so_far(self) -> Telemetry:
        """Return the telemetry of the exchanges of this fit so far, on this rank."""
        return merged(self._counting.counters.telemetry or self._attachment.costs())

    def numbers(self) -> dict[str, float]:
        """Return all numbers of `so_far`; none if the exchanges run in the graph."""
        return self.so_far().full() if self._attachment.logs_cost else {}

    def table(self) -> str:
        """Return the table of the last fit."""
        return summary(repr(self._attachment.strategy), self._counting.counters)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Add the costs to the logs of a step."""
        self._add_to(logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Add the costs to the logs of an epoch."""
        self._add_to(logs)

    def _add_to(self, logs: Logs) -> None:
        if logs is not None and self._attachment.logs_cost:
            logs.update(self.so_far().live())

    def finish(self) -> None:
        self._counting.counters.finish(self._attachment.costs())

    def on_train_end(self, logs: Logs = None) -> None:
        """Print on rank 0 what the exchanges of this fit cost, or that it had nothing left to train."""
        self.finish()
        epochs = self.params.get("epochs")
        if self._comm.rank != 0:
            return
        if epochs and not self._counting.trained:
            _log.info(f"nothing was trained: {epochs} epochs of this fit were trained before.")
        elif self._comm.size > 1 and self.params.get("verbose"):
            print(self.table(), flush=True)
