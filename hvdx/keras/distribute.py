"""The one added line: `model.fit(..., callbacks=[hvdx.keras.Distribute()])`."""

import sys
from typing import Any, Literal

import keras

from hvdx import comm as world
from hvdx.comm import Comm
from hvdx.errors import ConfigError, HvdxError, NotDistributedError, ReplicaError
from hvdx.keras import metrics, neighbours, replicas
from hvdx.keras.optimizer import Binding, attach, detach, optimizers_of
from hvdx.report.counters import Counters
from hvdx.strategies import Strategy, resolve


class Distribute(keras.callbacks.Callback):
    """Train one model on all the processes that were started.

    At the start of `fit` all ranks take rank 0's weights and optimiser state, and the optimiser is tied to the
    strategy in place; at the end it is a plain one again. In between metrics are those over all ranks (validation
    too), statistics that no gradient reaches are averaged at the end of each epoch, epochs end where the rank with
    the fewest batches ends, and callbacks that write (checkpoints, TensorBoard, CSV, the progress bar) work on rank 0
    alone. A process that was started alone trains as if this callback were not there.

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
        self._comm: Comm = world.start()
        self._bindings: list[Binding] = []
        self._last = _Last(self)
        self._alike = False
        self._train_logs: dict[str, Any] | None = None
        self._test_logs: dict[str, Any] = {}
        self._jit_compile: Any = None

    # -- the start of fit ---------------------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        """Keras: called before the training function is made."""
        super().set_model(model)
        self._last.set_model(model)
        if self._comm.size > 1 and (found := neighbours.find(self)) is not None:
            neighbours.arrange(found, self, self._last, self._comm.rank)

    def set_params(self, params: dict[str, Any]) -> None:
        """Keras: epochs and steps of this fit."""
        super().set_params(params)
        self._last.set_params(params)

    def on_train_begin(self, logs: Any = None) -> None:
        """Tie the optimisers; what all ranks have to agree on follows once the other callbacks have had their say."""
        self.counters = Counters(size=self._comm.size)
        self.counters.start()
        if self._comm.size == 1:
            return
        model = self.model
        if model.jit_compile:
            if self._comm.rank == 0:
                print(
                    "hvdx: jit_compile is off during this fit: XLA cannot compile Horovod's collectives.",
                    file=sys.stderr,
                )
            self._jit_compile = model.jit_compile
            model.jit_compile = False
        self._bindings = [
            attach(optimizer, self.strategy, self._comm, f"fit.{i}") for i, optimizer in enumerate(optimizers_of(model))
        ]
        model.make_train_function(force=True)
        self._alike = False
        self._train_logs = None

    def _agree(self) -> None:
        """Have all ranks start from the same place; called when no other callback will change it any more."""
        model = self.model
        mine = {
            "steps": self.params.get("steps"),
            "steps_per_execution": model.steps_per_execution,
            "initial_epoch": getattr(model, "_initial_epoch", None),
            "epochs": self.params.get("epochs"),
            "built": model.built,
        }
        everyone = self._comm.all_gather_object(mine, "start of fit")
        for key in ("steps_per_execution", "epochs", "built"):
            values = [r[key] for r in everyone]
            if len(set(values)) > 1:
                raise ReplicaError(f"fit: {key} differs between ranks: {values}. Every rank must be given the same.")
        self._last.limit_steps([r["steps"] for r in everyone], model.steps_per_execution)
        model._initial_epoch = everyone[0]["initial_epoch"]
        if model.built:
            self._make_alike()

    def _make_alike(self) -> None:
        for optimizer in optimizers_of(self.model):
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
        variables = replicas.state_of(self.model)
        replicas.check_alike(variables, self._comm)
        replicas.broadcast(variables, 0, self._comm)
        self._alike = True

    # -- steps and epochs -----------------------------------------------------------------------------------------

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """After the first step: did it go through hvdx? Then count, and check when it is time."""
        # With several steps an execution Keras counts the last one as full.
        self.counters.steps = self.counters.steps_before + min(batch + 1, self.params.get("steps") or batch + 1)
        if self._comm.size == 1:
            return
        if not self._alike:
            # Layers that build themselves in the first step have their weights only now.
            self._make_alike()
        if self.counters.steps_before == 0 and not any(b.reached for b in self._bindings) and self._has_weights():
            raise NotDistributedError(
                "the training step did not go through the optimizer, so the ranks would train apart. In a custom "
                "train_step call self.optimizer.apply_gradients(...) or self.optimizer.apply(...)."
            )
        if isinstance(self.check_every, int) and (batch + 1) % self.check_every == 0:
            self._check(f"after step {batch + 1}")

    def on_test_begin(self, logs: Any = None) -> None:
        """Validation is about to overwrite the training metrics, and must see the same weights everywhere."""
        if self._comm.size > 1:
            if self._bindings:
                self._last.check_enough(self.counters.steps - self.counters.steps_before)
            replicas.average_state(self.model, self._comm)
            if self._bindings and self._train_logs is None:
                local = self.model.get_metrics_result()
                self._train_logs = metrics.over_all_ranks(self.model, local, self._comm)

    def on_test_end(self, logs: Any = None) -> None:
        """Replace this rank's validation metrics by those over all ranks."""
        if self._comm.size > 1 and logs:
            self._test_logs = metrics.over_all_ranks(self.model, logs, self._comm)
            logs.update(self._test_logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Nothing of this epoch is combined yet."""
        self._train_logs = None
        self._test_logs = {}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace this rank's metrics by those over all ranks, and prove that the replicas are alike."""
        taken = self.counters.steps - self.counters.steps_before
        self.counters.steps_before = self.counters.steps
        if self._comm.size == 1:
            return
        self._last.check_enough(taken)
        self._last.resume()
        logs = {} if logs is None else logs
        if self._train_logs is None:
            replicas.average_state(self.model, self._comm)
            own = {k: v for k, v in logs.items() if not k.startswith("val_")}
            self._train_logs = metrics.over_all_ranks(self.model, own, self._comm)
        # Keras copies the logs of a validation before it shows them to callbacks, so they are mended here again.
        combined = self._train_logs | {f"val_{k}": v for k, v in self._test_logs.items()}
        logs.update({k: v for k, v in combined.items() if k in logs})
        if self.check_every is not None:
            self._check(f"after epoch {epoch + 1}")

    def on_train_end(self, logs: Any = None) -> None:
        """Leave a plain Keras model behind."""
        self.counters.finish(self._bindings)
        if self._comm.size == 1:
            return
        for optimizer in optimizers_of(self.model):
            detach(optimizer)
        self._bindings = []
        if self._jit_compile is not None:
            self.model.jit_compile, self._jit_compile = self._jit_compile, None
        self.model.train_function = None

    def _check(self, when: str) -> None:
        weights = [*self.model.trainable_weights]
        for optimizer in optimizers_of(self.model):
            weights += optimizer.variables
        replicas.check_identical(weights, self._comm, when)

    def _has_weights(self) -> bool:
        return bool(self.model.trainable_weights)


class _Last(keras.callbacks.Callback):
    """The half of `Distribute` that runs after all other callbacks: it agrees on what they decided."""

    def __init__(self, owner: Distribute):
        super().__init__()
        self._owner = owner
        self._limit: int | None = None
        self._cut = False
        self._stop_wanted = False

    def limit_steps(self, steps: list[int | None], steps_per_execution: int) -> None:
        """Have every epoch end where the rank with the fewest batches ends."""
        self._limit = None
        self._cut = self._stop_wanted = False
        if any(s is None for s in steps):
            unknown = [r for r, s in enumerate(steps) if s is None]
            raise ReplicaError(
                f"fit: the number of steps is not known beforehand on ranks {unknown}, so the ranks could end an epoch "
                "at different times and wait for each other. Give fit steps_per_epoch=, or the dataset a size: "
                "hvdx.shard(dataset, ..., steps=...) or dataset.apply(tf.data.experimental.assert_cardinality(n))."
            )
        known = [s for s in steps if s is not None]
        if len(set(known)) == 1:
            return
        fewest = min(known) // steps_per_execution * steps_per_execution
        if fewest == 0:
            raise ReplicaError(
                f"fit: a rank has no full step: {known} steps on the ranks. Give each its share of data."
            )
        self._limit = fewest
        if self._owner._comm.rank == 0:
            print(
                f"hvdx: the ranks have {min(known)} to {max(known)} steps; every epoch ends after {fewest}. "
                "hvdx.shard deals the data out evenly.",
                file=sys.stderr,
            )

    def on_train_begin(self, logs: Any = None) -> None:
        """Every other callback has restored what it wanted to restore."""
        self._owner._agree()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A stop in mid-epoch on one rank would leave the others waiting: keep it for the end of the epoch."""
        if self.model.stop_training:
            self._stop_wanted = True
            self.model.stop_training = False
        if self._limit is not None and batch + 1 >= self._limit:
            self._cut = self.model.stop_training = True

    def check_enough(self, taken: int) -> None:
        """The others are still in mid-epoch, waiting for a rank that has no more data: it has to say so."""
        expected = self._limit or self.params.get("steps")
        if expected and taken < expected and not self._owner.model.stop_training:
            comm = self._owner._comm
            raise HvdxError(
                f"rank {comm.rank} of {comm.size} ran out of data after {taken} of {expected} steps of an epoch. Give "
                "fit a smaller steps_per_epoch=, or a dataset that repeats: dataset.repeat()."
            )

    def resume(self) -> None:
        """The epoch that was cut short is over; go on with the next."""
        if self._cut:
            self._cut = self.model.stop_training = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """All ranks stop, or none."""
        wanted = bool(self.model.stop_training or self._stop_wanted)
        self.model.stop_training = any(self._owner._comm.all_gather_object(wanted, "end of epoch"))

    def on_train_end(self, logs: Any = None) -> None:
        """Keras: nothing left to agree on."""
