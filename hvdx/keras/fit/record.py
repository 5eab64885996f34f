"""What a fit reports: the costs of its exchanges, and its record.

The costs are in the logs, in the counters, and in the table after a fit. `Recording` receives the steps, the epochs and
the description of a fit.
"""

import functools

from hvdx.comm import Comm, offsets, supervision
from hvdx.keras import backend
from hvdx.keras.fit import description
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.fit.counting import Counting
from hvdx.keras.fit.limits import Limit
from hvdx.keras.fit.part import Part
from hvdx.keras.fit.recording import Recording
from hvdx.keras.fit.sync_callback import SyncCallback
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


class Record(Part):
    """Write the record of a fit."""

    alone = True

    def __init__(
        self,
        comm: Comm,
        recording: Recording,
        sync: SyncCallback,
        attachment: Attachment,
        counting: Counting,
        costs: Costs,
        limit: Limit,
    ):
        super().__init__()
        self._comm, self._recording, self._sync, self._attachment = comm, recording, sync, attachment
        self._counting, self._costs, self._limit = counting, costs, limit
        # True if all ranks record; a rank whose disk becomes full still answers the others.
        self._compares_clocks = False
        # Ranks at the begin of the fit, by their numbers in the world; and deaths that are in the record.
        self._ranks: list[int] = []
        self._deaths = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        self._ranks, self._deaths = list(self._comm.world_ranks), len(self._comm.deaths)
        describe = functools.partial(self._describe, repr(self._attachment.strategy))
        # A spare would write to the file of another rank.
        if self._comm.waits:
            return
        self._recording.begin(self._comm.rank, lambda: self._attachment.adapters, describe)

    def _describe(self, strategy: str) -> dict[str, object]:
        """Describe this fit, after its first step; `strategy` is that of its start."""
        exchanges = [adapter.exchange for adapter in self._attachment.adapters]
        networks = [n for e in exchanges if (n := getattr(e, "network", None)) is not None]
        return {
            "rank": self._comm.rank,
            "size": len(self._ranks),
            "attempt": list(supervised) if all(supervised := supervision.attempt()) else None,
            "begin": list(self._counting.begin),
            "strategy": strategy,
            "epochs": self.params.get("epochs"),
            "steps": self._sync.steps if self._comm.size > 1 else self.params.get("steps"),
            "batch": description.batch_size(self),
            "model": description.attempt(description.describe_model, self.model),
            "optimizer": description.attempt(description.describe_optimizer, self.model.optimizer),
            "backend": backend.name(),
            "versions": description.describe_versions(self._comm),
            "machine": description.describe_machine(),
            "link": {"bandwidth": networks[0].bandwidth, "latency": networks[0].latency} if networks else None,
        } | description.describe_process()

    def offer(self) -> object:
        """Return whether this rank records, its error, and its name of the fit."""
        return self._recording.state

    def agree(self, offered: list[tuple[bool, str, str]]) -> None:
        """Compare the ranks, and use rank 0's name of the fit; see `Recording.agree`."""
        self._recording.agree(offered)
        self._compares_clocks = self._recording.on and self._comm.size > 1
        self._compare_clocks()

    def now(self) -> bool:
        """Return whether the ranks compare their clocks."""
        return self._compares_clocks

    def begin_late(self, theirs: bool) -> None:
        """Record nothing, and compare clocks with the others."""
        self._compares_clocks = theirs

    def _compare_clocks(self) -> None:
        """Write the offset between the clocks of this rank and of rank 0. Collective."""
        if self._compares_clocks:
            self._recording.add_offset(offsets.measure(self._comm, self._recording.seconds))

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._recording.epoch_begins()

    def end_steps(self) -> None:
        """Keep the times of the flush, which the parts before this one have ended."""
        self._recording.span_ends("flush")

    def on_test_begin(self, logs: Logs = None) -> None:
        self._recording.span_begins()

    def on_test_end(self, logs: Logs = None) -> None:
        self._recording.span_ends("evaluation")

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Write the rows of steps once a second."""
        if self._recording.on:
            self._write_deaths()
            self._recording.write_if_due()

    def _write_deaths(self) -> None:
        """Write the deaths that are not in the record."""
        for death in self._comm.deaths[self._deaths :]:
            # Those that have joined since have no record, and no number in it.
            numbers = [self._ranks.index(rank) for rank in death.ranks if rank in self._ranks]
            self._recording.add_death(numbers, death.left, death.seconds)
        self._deaths = len(self._comm.deaths)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Write the line of an epoch, and after some epochs the offset of the clock."""
        self._write_deaths()
        costs = self._costs.so_far().full() if self._attachment.logs_cost else {}
        self._recording.end_epoch(epoch + 1, logs or {}, costs)
        # After 1, 2, 4, 8 ... epochs: all ranks decide alike, and short epochs do not become longer.
        if epoch & (epoch + 1) == 0 or self._counting.ended:
            self._compare_clocks()

    def on_train_end(self, logs: Logs = None) -> None:
        """Write the end of the fit."""
        self.end("done" if self._counting.ended else "limit" if self._limit.reached else "stopped")

    def end(self, reason: str) -> None:
        """Write the end of the fit, for a reason of `Recording.end`."""
        self._write_deaths()
        self._recording.end(reason, vars(merged(self._attachment.costs())))
