"""The optimisers of a fit on JAX or PyTorch, whose training steps Python calls."""

import functools
from collections.abc import Callable

import keras

from hvdx.comm import Comm
from hvdx.comm.launcher import threads_for
from hvdx.keras.adapters.optimizer import adapter_of, detach, optimizers_of
from hvdx.keras.adapters.rows import COUNT, rows_in, taken
from hvdx.keras.adapters.stepped import SteppedAdapter
from hvdx.keras.backends import stepped
from hvdx.keras.fit import batches
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.fit.batches import Losses
from hvdx.keras.fit.recording import Recording
from hvdx.keras.seams.frames import epoch_iterator
from hvdx.keras.seams.iterators import pad_passes
from hvdx.keras.seams.losses import reduced_by
from hvdx.keras.seams.models import restore_train_step, use_train_function, wrap_train_step
from hvdx.keras.types import Logs
from hvdx.strategies import Strategy, agree_on_strategy


class SteppedAttachment(Attachment):
    """Attach the optimisers at the start of a fit, and exchange after each step what is not exchanged in it."""

    adapters: list[SteppedAdapter]  # type: ignore[assignment]

    def __init__(self, comm: Comm, strategy: Strategy, recording: Recording):
        super().__init__(comm, strategy, recording)
        self._first = True

    def on_train_begin(self, logs: Logs = None) -> None:
        """Attach the optimisers, and make the training function."""
        model, self._first = self.model, True
        self._earlier_costs = []
        agree_on_strategy(self.strategy, self._comm)
        offered = self._comm.all_gather_object(batches.of(self), "the batches of a fit")
        self.plan = batches.agreed(offered, self._may_idle)
        self._build_optimizer()
        self._optimizers = optimizers_of(model)
        self.adapters = [self._attach(o, f"fit.{i}") for i, o in enumerate(self._optimizers)]  # type: ignore[misc]
        if keras.backend.backend() == "torch" and model.jit_compile:
            self._jit_compile, model.jit_compile = model.jit_compile, False
        stepped().prepare(threads_for(self._comm.local_size).threads)
        self._make_function()
        if self.plan.idles:
            self.params["steps"] = most = max(self.plan.steps)
            pad_passes(epoch_iterator(self), most)

    @property
    def _may_idle(self) -> bool:
        # A step without a batch is that of Keras, one at a time, and has a weight of its own.
        standard = type(self.model).train_step is keras.Model.train_step
        return super()._may_idle and standard and self.model.steps_per_execution == 1

    def _make_function(self) -> None:
        model, kind = self.model, type(self.model)
        standard = kind.train_step is keras.Model.train_step and kind.compute_loss is keras.Model.compute_loss
        if len(self.adapters) == 1 and kind.train_step is keras.Model.train_step and not self.plan.idles:
            self.adapters[0].expect_one_pass()
        # Another function each time: JAX keeps the trace of one that it knows, with the adapters that were there then.
        restore_train_step(model)
        wrap_train_step(model, functools.partial(self._with_losses, standard))
        use_train_function(model, None)
        super()._make_function()
        use_train_function(model, stepped().around(model.train_function, self._note, model))

    def _continue_with(self, strategy: Strategy) -> None:
        stepped().sync(self.model)
        before = list(self.adapters)
        super()._continue_with(strategy)
        for old, new in zip(before, self.adapters, strict=True):
            old.close()
            new.begin_epoch()

    def _with_losses(self, standard: bool, own_step: Callable[..., object], *args: object, **named: object) -> object:
        """Take a step, or trace it for batches of these rows, with losses that are reduced as one process does."""
        rows = None if self.plan.even else rows_in(args[-1] if args else named["data"])
        count = None if rows is None else keras.ops.cast(rows, COUNT)
        for adapter in self.adapters:
            adapter.begin_batch(rows)
        self._events.clear()
        losses = Losses(self._comm, self.strategy, self.plan, standard, self._events.append, count)
        with reduced_by(losses.reduce):
            return own_step(*args, **named)

    def _note(self, batch: object) -> None:
        """Count the rows of a step that begins: the weight of this rank in the exchange after the step.

        Without a batch, take part in what the others exchange in it, with weight 0.
        """
        if batch is None:
            for adapter in self.adapters:
                adapter.begin_batch(0.0)
                adapter.add_rows(0.0)
            batches.add_zeros(self._comm, self._events)
        elif self.strategy.counts_samples or not self.plan.even:
            rows = rows_in(batch)
            taken.add(rows)
            for adapter in self.adapters:
                adapter.add_rows(rows)

    def show_weights(self, needed: bool) -> None:
        """Take the values from the step; in the first step of a fit some parts read them in any case."""
        if self.adapters and (needed or self._first):
            stepped().sync(self.model)
        self._first = False

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Check that the optimisers took the step, and do the exchanges that are due; see `Attachment`."""
        self._check_step()
        for adapter in self.adapters:
            if adapter.due(self.model.steps_per_execution):
                stepped().sync(self.model)
                adapter.meet()
        super().on_train_batch_end(batch, logs)

    def on_train_end(self, logs: Logs = None) -> None:
        for optimizer in self._optimizers:
            attached = adapter_of(optimizer)
            if attached is not None and attached.owner is self:
                detach(optimizer)
        for adapter in self.adapters:
            adapter.close()
        self._optimizers, self.adapters = [], []
        restore_train_step(self.model)
        use_train_function(self.model, None)
        if self._jit_compile is not None:
            self.model.jit_compile, self._jit_compile = self._jit_compile, None
