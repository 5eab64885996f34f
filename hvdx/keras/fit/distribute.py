"""Distributed training by one added line: `model.fit(..., callbacks=[hvdx.keras.Distribute()])`."""

import copy
import os
import sys
from collections.abc import Callable, Collection
from typing import Any, Literal

import keras

from hvdx.comm import Comm, progress
from hvdx.errors import ConfigError, NotDistributedError, ReplicaError
from hvdx.keras.adapters import updates
from hvdx.keras.adapters.base import Adapter
from hvdx.keras.adapters.optimizer import adapter_of, attach, detach, optimizers_of
from hvdx.keras.adapters.optimizer_state import innermost
from hvdx.keras.adapters.rank_local import declare, declared, listed, rank_local_ids
from hvdx.keras.callbacks import MetricAverageCallback
from hvdx.keras.fit import (
    callback_list,
    data,
    description,
    finite,
    limits,
    metrics,
    nested,
    noise,
    replicas,
    samples,
    schedules,
    state,
    traces,
    train_step,
)
from hvdx.keras.fit.agreement.comparison import Comparison
from hvdx.keras.fit.evaluation import GroupEvaluation
from hvdx.keras.fit.plain_copies import PlainCopies
from hvdx.keras.fit.recording import Recording
from hvdx.keras.fit.sync_callback import SyncCallback
from hvdx.keras.joining import join
from hvdx.keras.seams.frames import calling_list
from hvdx.keras.seams.models import initial_epoch, layers_of, restore_train_step, set_initial_epoch, use_train_function
from hvdx.keras.shards import by_ranks
from hvdx.report.counters import Counters
from hvdx.report.summary import summary
from hvdx.strategies import Strategy, agree_on_strategy, resolve
from hvdx.strategies.telemetry import Telemetry, followed, merged


class Distribute(keras.callbacks.Callback):
    """Train one model on all the processes that were started.

    At the start of `fit` all ranks receive the weights and optimiser state of rank 0, and the optimiser is attached to
    the strategy in place. At the end of `fit` it is detached. During `fit`:

    - metrics, those of validation included, are computed over all ranks;
    - non-trainable weights, such as moving averages, are averaged at the end of each epoch (see `local`, `summed`);
    - an epoch ends when the rank with the fewest batches has no more, or under an asynchronous strategy when all ranks
      together have taken their steps;
    - callbacks that write (checkpoints, TensorBoard, CSV, the progress bar) run on rank 0 only;
    - dropout, augmentation layers and samples are different on each rank, even if all ranks have the same seed;
    - rank 0 prints at the end what the exchanges cost, unless `verbose` is 0.

    A process that was started alone trains as it would without this callback. Each rank supplies its own share of the
    data: see `hvdx.shard`.

    Args:
        strategy: a strategy or its one-line spelling. None means the strategy of `hvdx.init`; if there is none, that of
            `HVDX_STRATEGY`; if that is not set, `AllReduce()`.
        check_every: interval of the comparison of all weights over the ranks, bit by bit: "epoch", or a number of
            steps (then also at the end of each epoch), or None for no comparison.
        record: folder in which each rank records its steps and epochs, for `hvdx report`. None means the folder in
            `HVDX_RECORD`; if that is not set, nothing is recorded.
        local: weights without a gradient that each rank keeps for itself, such as a queue of embeddings: Keras
            variables, or layers for all such weights in them. They are not broadcast, averaged or compared.
        summed: weights without a gradient that count, such as samples seen. At the end of each epoch, the increments of
            all ranks are added up.

    Raises:
        ConfigError: if a strategy or option is unknown, or `HVDX_LIMIT` is not a limit; in `fit`, if a rank cannot
            write its record.

    Example:
        >>> callback = Distribute("all_reduce:compression=fp16")
        >>> callback.strategy
        AllReduce(compression='fp16')
    """

    def __init__(
        self,
        strategy: Strategy | str | None = None,
        check_every: int | Literal["epoch"] | None = "epoch",
        record: str | os.PathLike[str] | None = None,
        local: Any = None,
        summed: Any = None,
    ):
        super().__init__()
        if check_every not in ("epoch", None) and not (isinstance(check_every, int) and check_every > 0):
            raise ConfigError(
                f"check_every: expected 'epoch', a positive number of steps or None, got {check_every!r}."
            )
        self.strategy = resolve(strategy)
        self.check_every = check_every
        self._local, self._summed = listed("local", local), listed("summed", summed)
        self._limit = limits.from_environment()
        self._recording = Recording(record)
        self.counters = Counters()
        self._comm: Comm = join(self.strategy)
        self.strategy.check(self._comm)
        if self.strategy.asynchronous and isinstance(check_every, int):
            raise ConfigError(
                f"check_every={check_every}: under {self.strategy!r}, workers have different weights until the end of "
                "an epoch. Use check_every='epoch'."
            )
        if self.strategy.asynchronous and self._limit.steps and self._comm.size > 1:
            raise ConfigError(
                f"{limits.VARIABLE}={self._limit.text}: expected epochs or minutes under {self.strategy!r}, "
                "whose workers take different numbers of steps. Set another limit, or train with one worker."
            )
        self._sync = SyncCallback(self._comm, self._agree, self._begin_epoch)
        self._evaluation = GroupEvaluation(self._comm)
        self._comparison = Comparison(self._comm)
        self._copies = PlainCopies()
        self._callback_list: Any = None
        self._muted: list[Any] = []
        self._adapters: list[Adapter] = []
        self._earlier_costs: list[Telemetry] = []
        self._jit_compile: Any = None
        self._first_step, self._weights_broadcast = True, 0
        self._epoch, self._epoch_began = 0, False
        self._steps_before = 0
        # Number of the first step of this fit in its epoch; above 0 after a checkpoint in mid-epoch.
        self._first_batch: int | None = None
        self._logs = metrics.EpochLogs(self._comm)

    # -- the start and the end of fit -----------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        """Arrange the callback list; Keras calls this before it makes the training function."""
        super().set_model(model)
        self._sync.set_model(model)
        found = calling_list(self) if self._comm.size > 1 else None
        self._callback_list = found
        if found is not None:
            self._copies = PlainCopies(found.callbacks)
            self._muted = callback_list.arrange(found, self, self._sync, MetricAverageCallback, self._comm.rank)

    def set_params(self, params: dict[str, Any]) -> None:
        """Store the epochs and steps of this fit; Keras calls this before training."""
        super().set_params(params)
        self._sync.set_params(params)

    def on_train_begin(self, logs: Any = None) -> None:
        """Attach the optimisers; `SyncCallback` calls `_agree` once the other callbacks have begun."""
        if self._comm.size > 1:
            nested.refuse(self.model)
        declare(self.model, self._local, self._summed)
        callback_list.unmute(self._muted)
        self._sync.reset()
        self.counters = Counters(size=self._comm.size)
        self.counters.start()
        self._limit.begin()
        self._first_batch, self._epoch_began = None, False
        self._recording.begin(self._comm.rank, lambda: self._adapters, self._description(repr(self.strategy)))
        if self._comm.size == 1:
            self._recording.agree([self._recording.state])
            return
        progress.first_step(True)
        self._first_step, self._weights_broadcast = True, 0
        self._steps_before = 0
        self._earlier_costs = []
        agree_on_strategy(self.strategy, self._comm)
        self._build_optimizer()
        kept = traces.kept(self.model, self.strategy)
        if self._comm.any_true(kept is None):
            kept = None
        self._comparison = Comparison(self._comm, traced=kept is None)
        optimizers = optimizers_of(self.model)
        before = kept.adapters if kept is not None else [None] * len(optimizers)
        self._adapters = [
            self._attach(o, f"fit.{i}", earlier) for i, (o, earlier) in enumerate(zip(optimizers, before, strict=True))
        ]
        if self.model.jit_compile:
            self._jit_compile, self.model.jit_compile = self.model.jit_compile, False
            if self._comm.rank == 0:
                print(
                    "hvdx: jit_compile is off during this fit: XLA cannot compile exchanges with other ranks.",
                    file=sys.stderr,
                )
        self._precede_steps()
        if kept is not None:
            use_train_function(self.model, kept.function)
        else:
            self.model.make_train_function(force=True)
        if self._callback_list is None:
            self._sync.on_train_begin(logs)

    def _description(self, strategy: str) -> Callable[[], dict[str, Any]]:
        """Return the function that describes this fit for its record, after the first step.

        Args:
            strategy: strategy at the start of the fit.
        """

        def describe() -> dict[str, Any]:
            networks = [b.exchange.network for b in self._adapters if getattr(b.exchange, "network", None) is not None]
            link = {"bandwidth": networks[0].bandwidth, "latency": networks[0].latency} if networks else None
            return {
                "rank": self._comm.rank,
                "size": self._comm.size,
                "strategy": strategy,
                "epochs": self.params.get("epochs"),
                "steps": self._sync.steps,
                "batch": description.batch_size(self),
                "model": description.attempt(description.describe_model, self.model),
                "optimizer": description.attempt(description.describe_optimizer, self.model.optimizer),
                "versions": description.describe_versions(self._comm),
                "machine": description.describe_machine(),
                "link": link,
            } | description.describe_process()

        return describe

    def _build_optimizer(self) -> None:
        """Make the optimiser's variables before the first step, so that TensorFlow traces that step only once."""
        model = self.model
        # A custom train_step may apply the optimiser to other variables. A subclassed model without a `build` of its
        # own counts as built while some of its layers have no weights yet.
        complete = all(layer.built for layer in layers_of(model))
        standard = type(model).train_step is keras.Model.train_step and optimizers_of(model) == [model.optimizer]
        if model.built and complete and standard and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)

    def _precede_steps(self) -> None:
        """Give this rank random numbers of its own, and count samples if the strategy needs them."""
        model, rank = self.model, self._comm.rank
        # `Checkpoint`, which begins later, restores the states that this rank saved.
        noise.differ(model, rank)
        counts = [lambda data: samples.count_samples_of(model, data)] if self.strategy.counts_samples else []
        train_step.precede(model, lambda data: noise.seed_graph(rank), *counts)

    def _attach(self, optimizer: Any, name: str, earlier: Adapter | None = None) -> Adapter:
        attached = adapter_of(optimizer)
        if attached is not None and attached.owner is not None:
            # An exception ended the fit that attached the optimiser.
            self._jit_compile = attached.owner._jit_compile
            detach(optimizer)
        adapter = attach(optimizer, self.strategy, name, earlier=earlier)
        if adapter is not attached:
            adapter.owner = self
        else:
            # The script attached the optimiser. After an exception, servers may have other weights than this rank.
            adapter.renew()
        adapter.reset()
        return adapter

    def _agree(self) -> None:
        """Make all ranks begin with the same settings and weights, after all other callbacks have begun. Collective."""
        model = self.model
        mine = {
            "steps": self.params.get("steps"),
            "steps_per_execution": model.steps_per_execution,
            "initial_epoch": initial_epoch(model),
            "epochs": self.params.get("epochs"),
            "built": model.built,
            "shards": data.state(),
            "savers": (self._copies.described, self._copies.refused),
            "limit": self._limit.text,
            "record": self._recording.state,
            "alike": self._comparison.begin(self),
        }
        everyone = self._sync.all_gather_at("the start of fit", mine)
        self._recording.agree([r["record"] for r in everyone])
        for key in ("steps_per_execution", "epochs", "built", "limit"):
            values = [r[key] for r in everyone]
            if len(set(values)) > 1:
                name = limits.VARIABLE if key == "limit" else key
                raise ReplicaError(f"fit: {name} differs between ranks: {values}. Every rank must be given the same.")
        data.agree_on_orders([r["shards"] for r in everyone])
        self._set_epoch_length([r["steps"] for r in everyone])
        self._steps_before = -self._sync.steps_done
        set_initial_epoch(model, everyone[0]["initial_epoch"])
        epochs = (self.params.get("epochs") or 0) - (initial_epoch(model) or 0)
        schedules.tell(model, epochs * (self._sync.steps or 0) - self._sync.steps_done, self._comm)
        self._copies.begin(model, *everyone[0]["savers"])
        if model.built:
            # Rank-local state from an earlier fit or a checkpoint is not broadcast, so that a rank's momenta match its
            # residual. In mid-epoch, non-trainable weights are rank-local too.
            self._broadcast_state(
                rank_local_ids(model, bool(self._sync.steps_done), of=lambda _, adapter: adapter.has_state)
            )
        self._comparison.check([r["alike"] for r in everyone])
        state.begin(model)

    def _set_epoch_length(self, steps: list[int | None]) -> None:
        """Set the length of an epoch. Collective under an asynchronous strategy."""
        executed = self.model.steps_per_execution
        if not self.strategy.asynchronous:
            self._sync.limit_steps(steps, executed)
            return
        client = self._sync.share_steps(steps, executed, self.strategy)
        if self._callback_list is not None:
            callback_list.show_steps_of_all_ranks(
                self._callback_list, lambda: client.taken * executed, client.steps * executed
            )

    def _broadcast_state(self, excluded: Collection[int] = ()) -> None:
        replicas.broadcast_state(self.model, 0, self._comm, excluded)
        self._weights_broadcast = len(self.model.weights)

    def on_train_end(self, logs: Any = None) -> None:
        """Detach the optimisers that this callback attached, and undo its changes to the model."""
        progress.step("")
        progress.first_step(False)
        self.counters.finish(self._costs())
        done = self._epoch + 1 >= (self.params.get("epochs") or 0)
        self._end_record("done" if done else "limit" if self._limit.reached else "stopped")
        self._print_end()
        if self._comm.size == 1:
            return
        for optimizer in optimizers_of(self.model):
            attached = adapter_of(optimizer)
            if attached is not None and attached.owner is self:
                detach(optimizer)
        adapters, self._adapters = self._adapters, []
        if self._callback_list is not None:
            callback_list.show_steps_of_this_rank(self._callback_list)
        else:
            self._sync.on_train_end(logs)
        noise.agree(self.model)
        restore_train_step(self.model)
        if self._jit_compile is not None:
            self.model.jit_compile, self._jit_compile = self._jit_compile, None
        traces.keep(self.model, adapters, self.strategy)

    # -- steps and epochs -----------------------------------------------------------------------------------------

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin the counts, logs and timers of an epoch."""
        self._epoch, self._epoch_began = epoch, True
        if self._callback_list is None and self._comm.size > 1:
            self._sync.on_epoch_begin(epoch, logs)
        if self._comm.size > 1:
            # The end of a fit of another model, which a callback may run, makes the common generator the same again.
            noise.differ(self.model, self._comm.rank)
        self.counters.steps_before = self.counters.steps
        self._logs.begin()
        for adapter in self._adapters:
            adapter.restart_timer()

    def _begin_epoch(self) -> None:
        for adapter in self._adapters:
            adapter.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Record the progress of this rank, for reports of a stall."""
        progress.step(f"step {batch + 1} of epoch {self._epoch + 1}", (self._epoch, batch))
        if self._first_batch is None:
            self._first_batch = batch
        if self._recording.on:
            self._recording.step_begins()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Record the progress of this rank in validation."""
        progress.step(f"step {batch + 1} of validation in epoch {self._epoch + 1}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the step, check that it went through the optimiser, and compare the replicas if that is due."""
        progress.first_step(False)
        known = None if self.strategy.asynchronous else self.params.get("steps")
        self.counters.steps = self.counters.steps_before + min(batch + 1, known or batch + 1)
        if self._recording.on:
            self._recording.step_ends(self._steps_of_fit)
        if self._comm.size > 1:
            self._after_step(batch, logs)
        if self._recording.on:
            self._recording.write_if_due()
        if self._limit.after_step(self._steps_of_fit):
            self._leave()
        if self._comm.size > 1 and self._callback_list is None:
            self._sync.on_train_batch_end(batch, logs)

    @property
    def _steps_of_fit(self) -> int:
        """Steps of this rank since the fit began."""
        return self.counters.steps - (self._first_batch or 0)

    def _leave(self) -> None:
        """End this process after the steps of the limit, as all ranks do after the same step. Collective."""
        self._recording.steps_end()
        for adapter in self._adapters:
            adapter.flush()
        self._limit.reached = True
        self.counters.finish(self._costs())
        self._end_record("limit")
        self._say(f"the process ends after {self._steps_of_fit} steps")
        raise SystemExit(0)

    def _say(self, what: str) -> None:
        if self._comm.rank == 0:
            print(f"\nhvdx: {limits.VARIABLE}={self._limit.text}: {what}.", file=sys.stderr, flush=True)

    def _print_end(self) -> None:
        """Print on rank 0 what the exchanges of this fit cost, or that it had nothing left to train."""
        epochs = self.params.get("epochs")
        if self._comm.rank != 0:
            return
        if epochs and not self._epoch_began:
            print(f"hvdx: nothing was trained: {epochs} epochs of this fit were trained before.", file=sys.stderr)
        elif self._comm.size > 1 and self.params.get("verbose"):
            print(self.summary(), flush=True)

    def summary(self) -> str:
        """Return the table of the last fit on this rank: strategy, steps, seconds, bytes, and time in communication."""
        return summary(repr(self.strategy), self.counters)

    def _end_record(self, reason: str) -> None:
        self._recording.end(reason, vars(merged(self.counters.telemetry)))

    def _after_step(self, batch: int, logs: Any) -> None:
        """Check that the step went through the optimiser, and compare the replicas if that is due."""
        self._logs.see_step(logs)
        if self._first_step:
            # Layers that are built in the first step had no generators before it, and no weights to broadcast.
            noise.differ_in_layers(self.model, self._comm.rank)
        if self._first_step and len(self.model.weights) > self._weights_broadcast:
            for adapter in self._adapters:
                adapter.prepare_broadcast()
            self._broadcast_state({id(v) for part in declared(self.model) for v in part})
        if self._first_step and not self.strategy.asynchronous:
            self._comparison.after_first_step(self.model)
        self._first_step = False
        if not any(b.stepped for b in self._adapters) and self.model.trainable_weights:
            raise NotDistributedError(
                "the training step did not go through the optimizer, so the ranks would train separately. In a custom "
                "train_step call self.optimizer.apply_gradients(...) or self.optimizer.apply(...)."
            )
        # An optimiser that took no step has no exchange.
        exchanges = [b.exchange for b in self._adapters if b.exchange is not None]
        if self.strategy.provisional and self.strategy.ready(exchanges):
            self._switch_strategy(exchanges)
        if isinstance(self.check_every, int) and (batch + 1) % self.check_every == 0:
            when = f"after step {batch + 1} of epoch {self._epoch + 1}"
            self._check_finite(when)
            self._check_replicas(when)
        if logs is not None and self._reports():
            logs.update(self.cost().live())
        self._copies.after_step(self.model, batch)

    def _switch_strategy(self, exchanges: list[Any]) -> None:
        """Replace a provisional strategy by its successor. Collective."""
        self._sync.all_gather_at("the choice of a strategy")
        self._recording.before_switch()
        optimizers = optimizers_of(self.model)
        have_updates = not any(updates.assigns_weights(innermost(o)) for o in optimizers)
        self.strategy = self.strategy.successor(exchanges, self._comm, have_updates)
        for i, optimizer in enumerate(optimizers):
            old = self._adapters[i]
            self._earlier_costs.append(old.cost())
            detach(optimizer)
            self._adapters[i] = self._attach(optimizer, f"fit.{i}")
            self._adapters[i].steps.assign(old.steps)
            self._adapters[i].restart_timer()
        self._recording.switch(repr(self.strategy))
        self.model.make_train_function(force=True)

    def cost(self) -> Telemetry:
        """Return the telemetry of the exchanges of this fit so far, on this rank."""
        return merged(self.counters.telemetry or self._costs())

    def _costs(self) -> list[Telemetry]:
        """Return the telemetry of each optimiser, including steps under an earlier strategy of this fit."""
        now = [adapter.cost() for adapter in self._adapters]
        if not self._earlier_costs:
            # Copies, since the exchanges continue to count in the originals.
            return [copy.deepcopy(cost) for cost in now]
        return [followed(a, b) for a, b in zip(self._earlier_costs, now, strict=True)]

    def _reports(self) -> bool:
        return any(b.reports for b in self._adapters)

    def on_test_begin(self, logs: Any = None) -> None:
        """Combine the training metrics before validation overwrites them, and make all ranks hold the same weights."""
        if self._comm.size == 1:
            return
        if self._adapters:
            self._end_of_steps()
        mine = self._evaluation.batches(self)
        self._evaluation.begin(self._sync.all_gather_at(f"validation in epoch {self._epoch + 1}", mine))
        state.combine(self.model, self._comm)
        if self._adapters:
            self._logs.before_validation(self.model)

    def on_test_end(self, logs: Any = None) -> None:
        """Replace this rank's validation metrics by those of all ranks."""
        if self._comm.size == 1:
            return
        self._evaluation.finish(self.model)
        self._sync.all_gather_at(f"the end of validation in epoch {self._epoch + 1}")
        # A rank without validation batches has no logs, and takes part all the same.
        self._logs.after_validation(self.model, {} if logs is None else logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace this rank's metrics by those of all ranks, and check the replicas; end a fit that has a limit."""
        over = self._limit.after_epoch()
        if self._comm.size > 1:
            over = self._combine_epoch(epoch, logs, over)
        self._recording.end_epoch(epoch + 1, logs or {}, self.cost().full() if self._reports() else {})
        if over:
            self._limit.reached = self.model.stop_training = True
            if epoch + 1 < (self.params.get("epochs") or 0):
                self._say(f"the fit ends after epoch {epoch + 1}")
        if self._comm.size > 1 and self._callback_list is None:
            self._sync.on_epoch_end(epoch, logs)

    def _combine_epoch(self, epoch: int, logs: Any, over: bool) -> bool:
        """Combine the metrics of all ranks in place, and check the replicas; return rank 0's `over`. Collective."""
        if not self._logs.validated:
            self._end_of_steps()
        over = self._sync.all_gather_at(f"the end of epoch {epoch + 1}", over)[0]
        if not self._logs.validated:
            state.combine(self.model, self._comm)
        self._logs.finish(self.model, {} if logs is None else logs)
        if logs is not None and self._reports():
            logs.update(self.cost().live())
        self._check_finite(f"after epoch {epoch + 1}")
        if self.check_every is not None:
            self._check_replicas(f"after epoch {epoch + 1}")
        self._copies.after_epoch(self.model)
        return over

    def _end_of_steps(self) -> None:
        """Check that this rank took all steps of the epoch, and flush the adapters. Collective."""
        if self._recording.on:
            self._recording.steps_end()
        taken = self.counters.steps - self.counters.steps_before
        if self.model.steps_per_execution > 1 and self._adapters:
            # Keras counts the last execution as full, even if it ran out of data.
            total = max(int(b.steps.numpy()) for b in self._adapters)
            taken, self._steps_before = total - self._steps_before, total
        self._sync.check_enough(taken)
        self._sync.reset_cut()
        for adapter in self._adapters:
            adapter.flush()
        # Asynchronous workers meet at the end of an epoch only, and some may have taken no step.
        self._comparison.after_first_step(self.model)

    def _check_finite(self, when: str) -> None:
        firsts = [adapter.first_bad() for adapter in self._adapters]
        finite.check(self.model.trainable_weights, firsts, self._comm, when)

    def _check_replicas(self, when: str) -> None:
        own = rank_local_ids(self.model)
        variables = [*self.model.trainable_weights, *replicas.optimizer_state_of(self.model)]
        for ranks, some in by_ranks([v for v in variables if id(v) not in own], self._comm):
            replicas.check_identical(some, ranks, when)
