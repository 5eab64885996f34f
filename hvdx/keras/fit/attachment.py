"""The optimisers of a fit, attached to its strategy, and the training function that is traced with them."""

import copy

import keras

from hvdx.comm import Comm
from hvdx.errors import NotDistributedError
from hvdx.keras.adapters import updates
from hvdx.keras.adapters.base import Adapter
from hvdx.keras.adapters.optimizer import adapter_of, attach, detach, optimizers_of
from hvdx.keras.fit import noise, samples, traces, train_step
from hvdx.keras.fit.part import Part
from hvdx.keras.fit.positions import all_gather_at
from hvdx.keras.fit.recording import Recording
from hvdx.keras.optimizer_state import innermost
from hvdx.keras.seams.models import layers_of, restore_train_step, use_train_function
from hvdx.keras.types import Logs
from hvdx.log import Log
from hvdx.strategies import HostExchange, Strategy, agree_on_strategy
from hvdx.strategies.telemetry import Telemetry, concatenated

_log = Log(__name__)


class Attachment(Part):
    """Attach the optimisers at the start of a fit, and detach at its end those that were not attached before.

    Args:
        comm: the ranks.
        strategy: strategy of the fits.
        recording: recording of the fits, which a change of the strategy divides.

    Attributes:
        strategy: present strategy; a provisional one is replaced by its successor.
        adapters: adapter of each optimiser; none outside of a fit.
        traced: False if this fit uses the trace of an earlier one.
    """

    def __init__(self, comm: Comm, strategy: Strategy, recording: Recording):
        super().__init__()
        self._comm, self.strategy, self._recording = comm, strategy, recording
        self.adapters: list[Adapter] = []
        self._optimizers: list[keras.optimizers.Optimizer] = []
        self.traced = True
        self._earlier_costs: list[Telemetry] = []
        self._jit_compile: bool | str | None = None

    @property
    def logs_cost(self) -> bool:
        """True if the logs show the costs of the exchanges."""
        return any(adapter.logs_cost for adapter in self.adapters)

    @property
    def steps(self) -> int | None:
        """Steps that reached the optimisers in this fit, or None without an optimiser."""
        return max((int(adapter.steps.numpy()) for adapter in self.adapters), default=None)

    def costs(self) -> list[Telemetry]:
        """Return the telemetry of each optimiser, including steps under an earlier strategy of this fit."""
        now = [adapter.cost() for adapter in self.adapters]
        if not self._earlier_costs:
            # Copies, since the exchanges continue to count in the originals.
            return [copy.deepcopy(cost) for cost in now]
        return [concatenated(a, b) for a, b in zip(self._earlier_costs, now, strict=True)]

    def before_newcomers(self) -> None:
        """Prepare the adapters for a copy of their states."""
        for adapter in self.adapters:
            adapter.before_saving()

    def keep_costs(self) -> None:
        """Keep the costs so far, before the exchanges are opened anew."""
        if any(adapter.telemetries is not None for adapter in self.adapters):
            self._earlier_costs = self.costs()
            self._recording.restart_counters()

    def on_train_begin(self, logs: Logs = None) -> None:
        """Attach the optimisers, and make the training function or use the one that an earlier fit kept."""
        model, rank = self.model, self._comm.rank
        number = self._comm.world_ranks[rank]
        self._earlier_costs = []
        agree_on_strategy(self.strategy, self._comm)
        self._build_optimizer()
        kept = traces.kept(model, self.strategy)
        if self._comm.any_true(kept is None):
            kept = None
        self.traced = kept is None
        self._optimizers = optimizers = optimizers_of(model)
        before = kept.adapters if kept is not None else [None] * len(optimizers)
        self.adapters = [
            self._attach(o, f"fit.{i}", earlier) for i, (o, earlier) in enumerate(zip(optimizers, before, strict=True))
        ]
        if model.jit_compile:
            self._jit_compile, model.jit_compile = model.jit_compile, False
            if rank == 0:
                _log.info("jit_compile is off during this fit: XLA cannot compile exchanges with other ranks.")
        counts = [lambda data: samples.count_samples_of(model, data)] if self.strategy.counts_samples else []
        train_step.precede(model, lambda data: noise.seed_graph(number), *counts)
        if kept is not None:
            use_train_function(model, kept.function)
        else:
            model.make_train_function(force=True)

    def _build_optimizer(self) -> None:
        """Make the optimiser's variables before the first step, so that TensorFlow traces that step only once."""
        model = self.model
        # A custom train_step may apply the optimiser to other variables. A subclassed model without a `build` of its
        # own counts as built while some of its layers have no weights yet.
        complete = all(layer.built for layer in layers_of(model))
        standard = type(model).train_step is keras.Model.train_step and optimizers_of(model) == [model.optimizer]
        if model.built and complete and standard and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)

    def _attach(self, optimizer: keras.optimizers.Optimizer, name: str, earlier: Adapter | None = None) -> Adapter:
        attached = adapter_of(optimizer)
        if attached is not None and attached.owner is not None:
            # An exception ended the fit that attached the optimiser.
            self._jit_compile = attached.owner._jit_compile
            detach(optimizer)
        adapter = attach(optimizer, self.strategy, name, earlier=earlier)
        if adapter is not attached:
            adapter.belong_to(self)
        else:
            # The script attached the optimiser. After an exception, servers may have other weights than this rank.
            adapter.renew()
        adapter.reset()
        return adapter

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Restart the compute timers."""
        for adapter in self.adapters:
            adapter.restart_timer()

    def begin_steps(self) -> None:
        """Begin the epoch of each adapter."""
        self._check_optimizer()
        for adapter in self.adapters:
            adapter.begin_epoch()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Check that the step went through the optimisers, and replace a provisional strategy that is ready."""
        self._check_optimizer()
        if not any(adapter.stepped for adapter in self.adapters) and self.model.trainable_weights:
            raise NotDistributedError(
                "the training step did not go through the optimizer, so the ranks would train separately. In a custom "
                "train_step call self.optimizer.apply_gradients(...) or self.optimizer.apply(...)."
            )
        if self.strategy.provisional:
            # An optimiser that took no step has no exchange.
            exchanges = [adapter.exchange for adapter in self.adapters if adapter.exchange is not None]
            if self.strategy.ready(exchanges):
                self._switch_strategy(exchanges)

    def _check_optimizer(self) -> None:
        """Refuse another optimiser than that with which the fit began, and `compile`, after which Keras cannot go on.

        Raises:
            NotDistributedError: if a callback has called `compile`, or has given the model another optimiser.
        """
        present = self.model.optimizer
        known = not isinstance(present, keras.optimizers.Optimizer) or adapter_of(present) in self.adapters
        if self.model.train_function is None or not known:
            raise NotDistributedError(
                "fit: expected the optimizer with which it began, got a call of compile(), or another optimizer, in a "
                "callback: the ranks would train it separately. Do: end this fit before, compile, and call fit(..., "
                "initial_epoch=E) for the other epochs."
            )

    def _switch_strategy(self, exchanges: list[HostExchange]) -> None:
        """Replace a provisional strategy by its successor. Collective."""
        all_gather_at(self._comm, "the choice of a strategy")
        self._recording.before_switch()
        have_updates = not any(updates.assigns_weights(innermost(o)) for o in optimizers_of(self.model))
        self._continue_with(self.strategy.successor(exchanges, self._comm, have_updates))
        self._recording.switch(repr(self.strategy))

    def follow(self, strategy: Strategy) -> None:
        """Continue with the strategy of the ranks that this one joins: they may have replaced a provisional one.

        Args:
            strategy: their strategy.
        """
        if repr(strategy) != repr(self.strategy):
            self._continue_with(strategy)

    def _continue_with(self, strategy: Strategy) -> None:
        self.strategy = strategy
        for i, optimizer in enumerate(optimizers_of(self.model)):
            old = self.adapters[i]
            self._earlier_costs.append(old.cost())
            detach(optimizer)
            self.adapters[i] = self._attach(optimizer, f"fit.{i}")
            self.adapters[i].steps.assign(old.steps)
            self.adapters[i].restart_timer()
        self.model.make_train_function(force=True)

    def end_steps(self) -> None:
        """Apply every update in flight."""
        for adapter in self.adapters:
            adapter.settle()

    def on_train_end(self, logs: Logs = None) -> None:
        """Detach the optimisers that this part attached, and undo its changes to the model."""
        for optimizer in self._optimizers:
            attached = adapter_of(optimizer)
            if attached is not None and attached.owner is self:
                detach(optimizer)
        self._optimizers = []
        adapters, self.adapters = self.adapters, []
        restore_train_step(self.model)
        if self._jit_compile is not None:
            self.model.jit_compile, self._jit_compile = self._jit_compile, None
        traces.keep(self.model, adapters, self.strategy)
