"""The optimisers of a fit, attached to its strategy, and the training function that is traced with them."""

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import keras

from hvdx.comm import Comm
from hvdx.errors import NotDistributedError
from hvdx.keras.adapters import rows, updates
from hvdx.keras.adapters.base import Adapter, Call
from hvdx.keras.adapters.optimizer import adapter_of, attach, detach, optimizers_of
from hvdx.keras.fit import batches, noise, replicas
from hvdx.keras.fit.batches import Idling, Losses
from hvdx.keras.fit.part import Part
from hvdx.keras.fit.positions import all_gather_at
from hvdx.keras.fit.recording import Recording
from hvdx.keras.optimizer_state import innermost
from hvdx.keras.seams.frames import epoch_iterator
from hvdx.keras.seams.iterators import lengthen_epochs
from hvdx.keras.seams.losses import reduced_by
from hvdx.keras.seams.models import layers_of, restore_train_step, use_train_function, wrap_train_step
from hvdx.keras.seams.optimizers import rate_of
from hvdx.keras.types import Logs, Structure
from hvdx.log import Log
from hvdx.strategies import HostExchange, Strategy, agree_on_strategy
from hvdx.strategies.telemetry import Telemetry, concatenated

_log = Log(__name__)


def surround(model: keras.Model, around: Callable[[Structure], AbstractContextManager[None]]) -> None:
    """Make a model take each training step within a context.

    Args:
        model: compiled model, before its training function is made.
        around: function from what `train_step` takes to the context.
    """

    def train_step(own_step: Callable[..., object], data: Structure, *rest: object, **named: object) -> object:
        with around(data):
            return own_step(data, *rest, **named)

    restore_train_step(model)
    wrap_train_step(model, train_step)


class KeptTrace:
    """Training function of a fit that has ended, in the place of the model's own one.

    So the next fit need not trace again. TensorFlow never frees the inner graph of a traced Keras step, so a script
    that calls `fit` in a loop would lose memory with every trace, and wait for it.

    Keras calls it in a fit without `Distribute`, and then it makes the model's own function, which trains alone.
    `Model.compile` replaces it, as it does any training function.

    Args:
        model: the model, after its fit; its optimisers are detached.
        function: training function of the fit.
        adapters: adapter of each optimiser in it.
        mode: what else the trace depends on.
        idling: what a rank without a batch does in place of the function; None if no rank has fewer batches.
    """

    def __init__(
        self,
        model: keras.Model,
        function: Callable[..., object],
        adapters: Sequence[Adapter],
        strategy: Strategy,
        mode: object,
        idling: Idling | None,
    ):
        self._mode, self.idling = mode, idling
        self._model = weakref.ref(model)
        self.function, self.adapters = function, list(adapters)
        self._strategy, self._traced, self._settings = repr(strategy), _traced(model), _settings(model)

    def __call__(self, *args: object) -> object:
        model: keras.Model = self._model()
        model.make_train_function(force=True)
        return model.train_function(*args)

    def fits(self, model: keras.Model, strategy: Strategy, mode: object) -> bool:
        """Return whether the trace is what a new one of this model under this strategy would be.

        As in Keras, attributes that were changed after `compile`, such as `clipnorm`, count after the next `compile`.
        """
        traced = _traced(model)
        # Adapters that a script attached are still there.
        present = [None if a.owner is not None else a for a in self.adapters]
        return (
            self._model() is model
            and (self._strategy, self._mode) == (repr(strategy), mode)
            and self._settings == _settings(model)
            and len(self._traced) == len(traced)
            and all(a is b for a, b in zip(self._traced, traced, strict=True))
            and all(adapter_of(o) is a for o, a in zip(optimizers_of(model), present, strict=True))
        )


def keep_trace(
    model: keras.Model, adapters: Sequence[Adapter], strategy: Strategy, mode: object, idling: Idling | None
) -> None:
    """Keep the training function of a fit that ends, if all its adapters can be attached again.

    Args:
        model: the model; its optimisers are detached, and its settings are those before the fit.
        adapters: adapter of each optimiser.
        mode, idling: see `KeptTrace`.
    """
    function = model.train_function
    kept = function is not None and not isinstance(function, KeptTrace)
    kept = kept and all(a.reusable_across_fits for a in adapters)
    # An optimiser that came in during the fit is in the trace without an adapter.
    kept = kept and len(optimizers_of(model)) == len(adapters)
    use_train_function(model, KeptTrace(model, function, adapters, strategy, mode, idling) if kept else None)


def kept_trace(model: keras.Model, strategy: Strategy, mode: object) -> KeptTrace | None:
    """Return the trace that an earlier fit of the same training has kept, if there is one.

    Args:
        model: the model at the start of a fit, before its optimisers are attached.
        mode: see `KeptTrace`.
    """
    function = model.train_function
    return function if isinstance(function, KeptTrace) and function.fits(model, strategy, mode) else None


def _traced(model: keras.Model) -> list[object]:
    """Return the objects that a trace refers to and a script may replace, such as trainable weights."""
    optimizers = optimizers_of(model)
    # A variable, or a schedule.
    rates = [rate_of(innermost(o)) for o in optimizers]
    return [*optimizers, *rates, *model.trainable_variables]


def _settings(model: keras.Model) -> tuple[object, ...]:
    return model.run_eagerly, model.steps_per_execution, model.jit_compile


class Attachment(Part):
    """Attach the optimisers at the start of a fit, and detach at its end those that were not attached before.

    Args:
        recording: recording of the fits, which a change of the strategy divides.

    Attributes:
        strategy: present strategy; a provisional one is replaced by its successor.
        adapters: adapter of each optimiser; none outside of a fit.
        traced: False if this fit uses the trace of an earlier one.
        plan: batches of the ranks.
    """

    def __init__(self, comm: Comm, strategy: Strategy, recording: Recording):
        super().__init__()
        self._comm, self.strategy, self._recording = comm, strategy, recording
        self.adapters: list[Adapter] = []
        self._optimizers: list[keras.optimizers.Optimizer] = []
        self.traced = True
        self._earlier_costs: list[Telemetry] = []
        self._jit_compile: bool | str | None = None
        self.plan = batches.Plan()
        # What the step that was traced last exchanges, in order.
        self._events: list[Call | int] = []
        self._idling: Idling | None = None

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
        offered = self._comm.all_gather_object(batches.of(self), "the batches of a fit")
        self.plan = batches.agreed(offered, self._may_idle)
        self._build_optimizer()
        kept = kept_trace(model, self.strategy, self._mode)
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
        surround(model, lambda data: self._around_step(number, data))
        if kept is not None:
            use_train_function(model, kept.function)
        else:
            self._make_function()
        self._idle_at_the_end(None if kept is None else kept.idling)

    @property
    def _may_idle(self) -> bool:
        """True if a rank without a batch can take part in the steps of the others."""
        # Split layers exchange activations, ranks that may die are dealt the samples anew, and a provisional strategy
        # is replaced by one whose steps this rank may not have traced.
        return self._weighs and not self._comm.survives and not self.strategy.provisional

    @property
    def _weighs(self) -> bool:
        """True if adapters can weigh the gradients of a rank by its rows."""
        return not self.strategy.asynchronous and self._comm.mesh is None

    @property
    def _mode(self) -> tuple[object, ...]:
        """What a trace depends on, beside the model and the strategy: the numbers of steps may change."""
        return self.plan.even, self.plan.fixed, self.plan.alike, self.plan.full, self.plan.idles

    @contextlib.contextmanager
    def _around_step(self, number: int, data: Structure) -> Iterator[None]:
        """Seed the noise of a step that is being traced, count its rows, and reduce its losses as one process does."""
        noise.seed_graph(number)
        self._events.clear()
        count = None
        if self.strategy.counts_samples or not (self.plan.even or self.strategy.asynchronous):
            count = rows.rows_of(data)
            rows.taken.add_in_graph(count)
        for adapter in self.adapters:
            adapter.begin_step(self._events.append, self.plan.full)
            if count is not None and (self.strategy.counts_samples or self._weighs):
                adapter.count_samples(count)
        kind = type(self.model)
        standard = kind.train_step is keras.Model.train_step and kind.compute_loss is keras.Model.compute_loss
        losses = Losses(self._comm, self.strategy, self.plan, standard, self._events.append, count)
        try:
            with reduced_by(losses.reduce):
                yield
        finally:
            for adapter in self.adapters:
                adapter.begin_step()

    def weigh_by_rows(self) -> None:
        """Weigh this rank by its rows from the next step on, which is traced anew, as on all ranks."""
        self.plan = self.plan._replace(even=False)
        self._make_function()

    def _idle_at_the_end(self, kept: Idling | None = None) -> None:
        """Let this rank take part in the steps of the others, if it has fewer batches."""
        if self.plan.idles:
            own, most = self.plan.steps[self._comm.rank], max(self.plan.steps)
            self.params["steps"] = most
            lengthen_epochs(epoch_iterator(self), most)
            made = kept.resize(own, most) if kept is not None else None
            self._idling = made or Idling(self.model, self._comm, own, most, self._events)
            use_train_function(self.model, self._idling)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Number the step."""
        if self._idling is not None:
            self._idling.begin_batch(batch)

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

    def show_weights(self, needed: bool) -> None:
        """Make the model's variables hold their values before the other parts end a step; here they always do.

        Args:
            needed: whether parts read them in each step.
        """

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Restart the compute timers, and number the steps anew."""
        if self._idling is not None:
            self._idling.begin_batch(0)
        for adapter in self.adapters:
            adapter.restart_timer()

    def begin_steps(self) -> None:
        """Begin the epoch of each adapter."""
        self._check_optimizer()
        for adapter in self.adapters:
            adapter.begin_epoch()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Check that the step went through the optimisers, and replace a provisional strategy that is ready."""
        self._check_step()
        if self.strategy.provisional:
            # An optimiser that took no step has no exchange.
            exchanges = [adapter.exchange for adapter in self.adapters if adapter.exchange is not None]
            if self.strategy.ready(exchanges):
                self._switch_strategy(exchanges)

    def _check_step(self) -> None:
        self._check_optimizer()
        if not any(adapter.stepped for adapter in self.adapters) and self.model.trainable_weights:
            raise NotDistributedError(
                "the training step did not go through the optimizer, so the ranks would train separately. In a custom "
                "train_step call self.optimizer.apply_gradients(...) or self.optimizer.apply(...)."
            )

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
        have_updates = all(updates.combines(innermost(o)) for o in optimizers_of(self.model))
        self._continue_with(self.strategy.successor(exchanges, self._comm, have_updates))
        self._recording.switch(repr(self.strategy))

    def follow(self, strategy: Strategy) -> None:
        """Continue with the strategy of the ranks that this one joins: they may have replaced a provisional one."""
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
        self._make_function()

    def _make_function(self) -> None:
        self.model.make_train_function(force=True)

    def end_steps(self) -> None:
        """Apply every update in flight."""
        for adapter in self.adapters:
            adapter.settle()
        self.rejoin()

    def rejoin(self) -> None:
        """Give ranks that have idled the bits of one that has not. Collective if ranks idle.

        TensorFlow optimises the graph of an idle step for itself, so it may round an optimiser's arithmetic otherwise.
        """
        if self.plan.idles:
            shared = replicas.shared_state_of(self.model)
            found = replicas.differing(shared, self._comm)
            root = self.plan.steps.index(max(self.plan.steps))
            replicas.broadcast([shared[i] for i in found], root, self._comm)

    def on_train_end(self, logs: Logs = None) -> None:
        """Detach the optimisers that this part attached, and undo its changes to the model."""
        for optimizer in self._optimizers:
            attached = adapter_of(optimizer)
            if attached is not None and attached.owner is self:
                detach(optimizer)
        self._optimizers = []
        adapters, self.adapters = self.adapters, []
        restore_train_step(self.model)
        idling, self._idling = self._idling, None
        if idling is not None:
            use_train_function(self.model, idling.function)
        if self._jit_compile is not None:
            self.model.jit_compile, self._jit_compile = self._jit_compile, None
        keep_trace(self.model, adapters, self.strategy, self._mode, idling)
