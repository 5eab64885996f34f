"""The one added line: `model.fit(..., callbacks=[hvdx.keras.Distribute()])`."""

import copy
import sys
from collections.abc import Collection
from typing import Any, Literal

import keras

from hvdx.comm import Comm, progress
from hvdx.errors import ConfigError, NotDistributedError, ReplicaError
from hvdx.keras.adapters import updates
from hvdx.keras.adapters.base import Adapter
from hvdx.keras.adapters.optimizer import adapter_of, attach, detach, optimizers_of
from hvdx.keras.adapters.optimizer_state import innermost
from hvdx.keras.adapters.rank_local import rank_local_ids
from hvdx.keras.callbacks import MetricAverageCallback
from hvdx.keras.fit import callback_list, data, finite, metrics, replicas, samples
from hvdx.keras.fit.sync_callback import SyncCallback
from hvdx.keras.joining import join
from hvdx.report.counters import Counters
from hvdx.strategies import Strategy, agree_on_strategy, resolve
from hvdx.strategies.telemetry import Telemetry, followed, merged


class Distribute(keras.callbacks.Callback):
    """Train one model on all the processes that were started.

    At the start of `fit` all ranks take rank 0's weights and optimiser state, and the optimiser is tied to the
    strategy in place; at the end it is a plain one again. In between metrics are those over all ranks (validation
    too), statistics that no gradient reaches are averaged at the end of each epoch, epochs end where the rank with
    the fewest batches ends (under a `ParameterServer`: when all ranks together have taken their steps), and callbacks
    that write (checkpoints, TensorBoard, CSV, the progress bar) work on rank 0 alone. A process that was started alone
    trains as if this callback were not there.

    Each rank brings its own part of the data: see `hvdx.shard`.

    Args:
        strategy: how the workers combine their work: a strategy, its one-line spelling, or None for what
            `HVDX_STRATEGY` says, else `AllReduce()`.
        check_every: compare the bits of all weights over the ranks "epoch" by epoch, or every so many steps (int)
            and at the end of each epoch, or never (None).

    Raises:
        ConfigError: an unknown strategy or option.

    Example:
        >>> callback = Distribute("all_reduce:compression=fp16")
        >>> callback.strategy
        AllReduce(compression='fp16')
    """

    def __init__(self, strategy: Strategy | str | None = None, check_every: int | Literal["epoch"] | None = "epoch"):
        super().__init__()
        if check_every not in ("epoch", None) and not (isinstance(check_every, int) and check_every > 0):
            raise ConfigError(
                f"check_every: expected 'epoch', a positive number of steps or None, got {check_every!r}."
            )
        self.strategy = resolve(strategy)
        self.check_every = check_every
        self.counters = Counters()
        self._comm: Comm = join(self.strategy)
        self.strategy.check(self._comm)
        if self.strategy.asynchronous and isinstance(check_every, int):
            raise ConfigError(
                f"check_every={check_every}: workers of a parameter server differ from the first step of an epoch "
                "to its last. Use check_every='epoch'."
            )
        self._last = SyncCallback(self._comm, self._agree)
        self._found: Any = None
        self._muted: list[Any] = []
        self._adapters: list[Adapter] = []
        self._earlier_costs: list[Telemetry] = []
        self._jit_compile: Any = None
        self._alike = False
        self._epoch = 0
        self._steps_before = 0
        self._logs = metrics.EpochLogs(self._comm)

    # -- the start and the end of fit -----------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        """Keras: called before the training function is made."""
        super().set_model(model)
        self._last.set_model(model)
        found = callback_list.find(self) if self._comm.size > 1 else None
        self._found = found
        if found is not None:
            self._muted = callback_list.arrange(found, self, self._last, MetricAverageCallback, self._comm.rank)

    def set_params(self, params: dict[str, Any]) -> None:
        """Keras: epochs and steps of this fit."""
        super().set_params(params)
        self._last.set_params(params)

    def on_train_begin(self, logs: Any = None) -> None:
        """Tie the optimisers; what all ranks have to agree on follows once the other callbacks have had their say."""
        callback_list.unmute(self._muted)
        self._last.renew()
        self.counters = Counters(size=self._comm.size)
        self.counters.start()
        if self._comm.size == 1:
            return
        progress.first_step(True)
        self._alike = False
        self._steps_before = 0
        self._earlier_costs = []
        agree_on_strategy(self.strategy, self._comm)
        self._build_optimizer()
        self._adapters = [self._attach(o, f"fit.{i}") for i, o in enumerate(optimizers_of(self.model))]
        if self.model.jit_compile:
            self._jit_compile, self.model.jit_compile = self.model.jit_compile, False
            if self._comm.rank == 0:
                print(
                    "hvdx: jit_compile is off during this fit: XLA cannot compile what talks to other ranks.",
                    file=sys.stderr,
                )
        if self.strategy.counts_samples:
            samples.count_samples_of(self.model)
        self.model.make_train_function(force=True)
        if self._found is None:
            self._last.on_train_begin(logs)

    def _build_optimizer(self) -> None:
        """Make the optimiser's variables now: TensorFlow would trace twice a step that makes them."""
        model = self.model
        # A train_step of somebody's own may apply it to other variables.
        standard = type(model).train_step is keras.Model.train_step and optimizers_of(model) == [model.optimizer]
        if model.built and standard and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)

    def _attach(self, optimizer: Any, name: str) -> Adapter:
        attached = adapter_of(optimizer)
        if attached is not None and attached.owner is not None:
            # Left by a fit that an exception ended.
            self._jit_compile = attached.owner._jit_compile
            detach(optimizer)
        adapter = attach(optimizer, self.strategy, name)
        if adapter is not attached:
            adapter.owner = self
        else:
            # A script's own, of which an exception may have left servers with other weights.
            adapter.renew()
        adapter.reset()
        return adapter

    def _agree(self) -> None:
        """Have all ranks start from the same place; called when no other callback will change it any more."""
        model = self.model
        mine = {
            "steps": self.params.get("steps"),
            "steps_per_execution": model.steps_per_execution,
            "initial_epoch": getattr(model, "_initial_epoch", None),
            "epochs": self.params.get("epochs"),
            "built": model.built,
            "shards": data.state(),
        }
        everyone = self._last.all_gather_at("the start of fit", mine)
        for key in ("steps_per_execution", "epochs", "built"):
            values = [r[key] for r in everyone]
            if len(set(values)) > 1:
                raise ReplicaError(f"fit: {key} differs between ranks: {values}. Every rank must be given the same.")
        data.agree([r["shards"] for r in everyone])
        self._set_length([r["steps"] for r in everyone])
        self._steps_before = -self._last.begun
        model._initial_epoch = everyone[0]["initial_epoch"]
        if model.built:
            # Where an optimiser has gone on with its own rank's gradients, its momenta stay with their residual.
            # In mid-epoch, so have weights that no gradient reaches.
            self._make_alike(rank_local_ids(model, bool(self._last.begun), of=lambda _, adapter: adapter.has_state))

    def _set_length(self, steps: list[int | None]) -> None:
        """How long is an epoch?"""
        executed = self.model.steps_per_execution
        if not self.strategy.asynchronous:
            self._last.limit_steps(steps, executed)
            return
        tickets = self._last.share_steps(steps, executed, self.strategy)
        if self._found is not None:
            callback_list.show_all(self._found, lambda: tickets.taken * executed, tickets.steps * executed)

    def _make_alike(self, but: Collection[int] = ()) -> None:
        replicas.broadcast_state(self.model, 0, self._comm, but)
        self._alike = True

    def on_train_end(self, logs: Any = None) -> None:
        """Leave a plain Keras model behind, but for optimisers that a script tied itself."""
        progress.step("")
        progress.first_step(False)
        self.counters.finish(self._costs())
        if self._comm.size == 1:
            return
        for optimizer in optimizers_of(self.model):
            attached = adapter_of(optimizer)
            if attached is not None and attached.owner is self:
                detach(optimizer)
        self._adapters = []
        if self._found is not None:
            callback_list.show_own(self._found)
        samples.restore_train_step(self.model)
        if self._jit_compile is not None:
            self.model.jit_compile, self._jit_compile = self._jit_compile, None
        self.model.train_function = None

    # -- steps and epochs -----------------------------------------------------------------------------------------

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Nothing of this epoch is counted or combined yet."""
        self._epoch = epoch
        if self._found is None and self._comm.size > 1:
            self._last.on_epoch_begin(epoch, logs)
        self.counters.steps_before = self.counters.steps
        self._logs.begin()
        for adapter in self._adapters:
            adapter.restart_timer()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note where this rank is, should the others wait for it."""
        progress.step(f"step {batch + 1} of epoch {self._epoch + 1}", (self._epoch, batch))

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """See `on_train_batch_begin`."""
        progress.step(f"step {batch + 1} of validation in epoch {self._epoch + 1}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """After the first step: did it go through hvdx? Then count, and check when it is time."""
        progress.first_step(False)
        known = None if self.strategy.asynchronous else self.params.get("steps")
        self.counters.steps = self.counters.steps_before + min(batch + 1, known or batch + 1)
        if self._comm.size == 1:
            return
        self._logs.see_step(logs)
        if not self._alike:
            # Layers that build themselves in the first step have their weights only now, and nothing is older.
            for adapter in self._adapters:
                adapter.prepare_broadcast()
            self._make_alike()
        if not any(b.stepped for b in self._adapters) and self.model.trainable_weights:
            raise NotDistributedError(
                "the training step did not go through the optimizer, so the ranks would train apart. In a custom "
                "train_step call self.optimizer.apply_gradients(...) or self.optimizer.apply(...)."
            )
        # An optimiser that took no step has no exchange.
        exchanges = [b.exchange for b in self._adapters if b.exchange is not None]
        if self.strategy.provisional and self.strategy.ready(exchanges):
            self._go_over(exchanges)
        if isinstance(self.check_every, int) and (batch + 1) % self.check_every == 0:
            when = f"after step {batch + 1} of epoch {self._epoch + 1}"
            self._check_finite(when)
            self._check(when)
        if logs is not None and self._reports():
            logs.update(self.cost().live())
        if self._found is None:
            self._last.on_train_batch_end(batch, logs)

    def _go_over(self, exchanges: list[Any]) -> None:
        """Go on with the successor of a provisional strategy, which has seen enough."""
        self._last.all_gather_at("the choice of a strategy")
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
        self.model.make_train_function(force=True)

    def cost(self) -> Telemetry:
        """What the exchanges of this fit have cost so far, on this rank."""
        return merged(self.counters.telemetry or self._costs())

    def _costs(self) -> list[Telemetry]:
        """Of each optimiser, the steps under an earlier strategy of this fit included."""
        now = [adapter.cost() for adapter in self._adapters]
        if not self._earlier_costs:
            # Copies, since an exchange goes on counting in its own.
            return [copy.deepcopy(cost) for cost in now]
        return [followed(a, b) for a, b in zip(self._earlier_costs, now, strict=True)]

    def _reports(self) -> bool:
        return any(b.reports for b in self._adapters)

    def on_test_begin(self, logs: Any = None) -> None:
        """Validation is about to overwrite the training metrics, and must see the same weights everywhere."""
        if self._comm.size == 1:
            return
        if self._adapters:
            self._end_of_steps()
        self._last.all_gather_at(f"validation in epoch {self._epoch + 1}")
        replicas.average_state(self.model, self._comm)
        if self._adapters:
            self._logs.before_validation(self.model)

    def on_test_end(self, logs: Any = None) -> None:
        """Replace this rank's validation metrics by those over all ranks."""
        if self._comm.size > 1 and logs:
            self._last.all_gather_at(f"the end of validation in epoch {self._epoch + 1}")
            self._logs.after_validation(self.model, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace this rank's metrics by those over all ranks, and prove that the replicas are alike."""
        if self._comm.size == 1:
            return
        if not self._logs.validated:
            self._end_of_steps()
        self._last.all_gather_at(f"the end of epoch {epoch + 1}")
        if not self._logs.validated:
            replicas.average_state(self.model, self._comm)
        self._logs.finish(self.model, {} if logs is None else logs)
        if logs is not None and self._reports():
            logs.update(self.cost().full())
        self._check_finite(f"after epoch {epoch + 1}")
        if self.check_every is not None:
            self._check(f"after epoch {epoch + 1}")
        if self._found is None:
            self._last.on_epoch_end(epoch, logs)

    def _end_of_steps(self) -> None:
        """The steps of an epoch are over on this rank: were they all?"""
        taken = self.counters.steps - self.counters.steps_before
        if self.model.steps_per_execution > 1 and self._adapters:
            # Keras counts a last execution as full, however many of its steps found data.
            total = max(int(b.steps.numpy()) for b in self._adapters)
            taken, self._steps_before = total - self._steps_before, total
        self._last.check_enough(taken)
        self._last.restart_timer()
        for adapter in self._adapters:
            adapter.flush()

    def _check_finite(self, when: str) -> None:
        firsts = [adapter.first_bad() for adapter in self._adapters]
        finite.check(self.model.trainable_weights, firsts, self._comm, when)

    def _check(self, when: str) -> None:
        own = rank_local_ids(self.model)
        variables = [*self.model.trainable_weights, *replicas.optimizer_state_of(self.model)]
        replicas.check_identical([v for v in variables if id(v) not in own], self._comm, when)
