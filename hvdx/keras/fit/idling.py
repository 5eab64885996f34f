"""Steps of a rank that has no batch left, in which it takes part in those of the others."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from hvdx.comm import Comm
from hvdx.keras.adapters import rows
from hvdx.keras.adapters.base import Call
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.fit.losses import name_of_sum
from hvdx.keras.types import Gradient, Variable


class Idling:
    """Training function that takes this rank's steps, and then those of the others with weight 0.

    Args:
        model: compiled model, with its training function.
        comm: the ranks.
        own, all: number of batches of this rank, and of the rank that has the most.
        events: what this rank's steps exchange, in order: calls of optimisers, and numbers of values that are summed.

    Attributes:
        function: the model's own training function.
    """

    def __init__(self, model: keras.Model, comm: Comm, own: int, all: int, events: Sequence[Call | int]):
        self._model, self._comm, self._own, self._all, self._events = model, comm, own, all, events
        self.function: Callable[..., object] = model.train_function
        self._at_once = model.steps_per_execution
        # As this rank's own steps: eager and traced operations may round differently.
        eager = model.run_eagerly or tf.config.functions_run_eagerly()
        self._idle: Callable[[], object] | None = self._step if eager else None
        self._logs: object = None
        # With constant gradients, TensorFlow would call Horovod while it optimises the graph.
        with tf.device("CPU:0"):
            self._zero = tf.Variable(0.0, trainable=False)
        self._batch = 0

    def resize(self, own: int, all: int) -> "Idling":
        """Take other numbers of batches from the next step on."""
        self._own, self._all, self._batch = own, all, 0
        return self

    def begin_batch(self, batch: int) -> None:
        """Begin the step with this number in its epoch, from 0."""
        self._batch = batch

    def __call__(self, iterator: object) -> object:
        # A callback that calls `Distribute` may not pass on the begin of a step.
        begin, self._batch = self._batch, self._batch + self._at_once
        own = max(0, min(self._at_once, self._own - begin))
        if own:
            self._logs = self.function(iterator)
        for _ in range(min(self._at_once, self._all - begin) - own):
            if self._idle is None:
                # Not called as a function, of which TensorFlow would say that it is traced in each fit.
                self._idle = tf.function(self._step, autograph=False).get_concrete_function()
            self._idle()
        return self._logs

    def _step(self) -> None:
        events, sums = list(self._events), 0
        for event in events:
            if isinstance(event, int):
                sums += 1
                rows.total(self._comm, [tf.zeros((), tf.float64)] * event, name_of_sum(sums))
            else:
                self._repeat(event)

    def _repeat(self, call: Call) -> None:
        adapter = call.adapter
        (optimizer,) = (o for o in optimizers_of(self._model) if adapter_of(o) is adapter)
        adapter.begin_step()
        adapter.count_samples(0)
        zeros = [self._zeros(v, indices) for v, indices in zip(call.variables, call.indices, strict=True)]
        adapter.idle(optimizer, zeros, call.variables)
        adapter.begin_step()

    def _zeros(self, variable: Variable, indices: tf.DType | None) -> Gradient:
        """Return a gradient of zeros; with a dtype of indices, of no rows."""
        dtype, shape = keras.backend.standardize_dtype(variable.dtype), tuple(variable.shape)
        zero = tf.cast(self._zero, dtype)
        if indices is None:
            return tf.fill(shape, zero)
        none = tf.cast(self._zero, tf.int32)
        values = tf.ensure_shape(tf.fill(tf.stack([none, *shape[1:]]), zero), (None, *shape[1:]))
        return tf.IndexedSlices(values, tf.fill([none], tf.cast(none, indices)), tf.constant(shape, indices))
