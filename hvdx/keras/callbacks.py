"""The callbacks of `horovod.tensorflow.keras`, for Keras 3."""

import os
from collections.abc import Callable, Sequence

import keras

from hvdx.errors import ConfigError
from hvdx.keras.adapters.local_variables import LocalVariables
from hvdx.keras.adapters.optimizer import adapter_of, flush, optimizers_of
from hvdx.keras.adapters.rank_local import rank_local_ids
from hvdx.keras.fit import metrics, replicas
from hvdx.keras.joining import join
from hvdx.keras.optimizer_state import innermost
from hvdx.keras.seams.callbacks import GuardedModelCheckpoint
from hvdx.keras.seams.layers import KerasVariable
from hvdx.keras.seams.models import change_result, restore_result
from hvdx.keras.seams.optimizers import momenta_of, rate_of, trained_variables
from hvdx.keras.types import Logs, Variable


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Start all ranks from one rank's weights and optimiser state.

    Before validation, and at the end of each epoch and of training, it flushes the optimisers, so that all ranks hold
    the same weights. Put it first in the list of callbacks.

    Args:
        root_rank: rank whose values are broadcast.
        device: not supported; weights are sent from the device that holds them.
        local_variables: a Keras or TensorFlow variable, or several, to exclude from the broadcast.

    Raises:
        ConfigError: if an argument is not supported, or `local_variables` holds something other than variables.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Variable | Sequence[Variable] | None = None):
        super().__init__()
        if device:
            raise ConfigError("BroadcastGlobalVariablesCallback: device: not supported by hvdx. Leave it out.")
        self.root_rank = root_rank
        self._local = LocalVariables()
        self._local.add(local_variables)
        self._done = False

    def register_local_var(self, var: Variable) -> None:
        """Exclude variables from the broadcast.

        Args:
            var: a Keras or TensorFlow variable, or several.
        """
        self._local.add(var)

    def set_model(self, model: keras.Model) -> None:
        """Turn XLA off before Keras makes the training function, because XLA cannot compile collectives."""
        super().set_model(model)
        if join().size > 1 and any(adapter_of(o) for o in optimizers_of(model)):
            model.jit_compile = False

    def on_train_begin(self, logs: Logs = None) -> None:
        """Broadcast again in this fit."""
        self._done = False

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Broadcast before the first step if layers are built; all callbacks have restored their weights by then."""
        if not self._done and self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcast after the first step if layers were built in it."""
        if not self._done:
            self._broadcast()

    def on_test_begin(self, logs: Logs = None) -> None:
        """Flush, so that validation uses the same weights on all ranks."""
        self._flush()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Flush, so that all ranks save the same weights."""
        self._flush()

    def on_train_end(self, logs: Logs = None) -> None:
        """Flush, so that all ranks return the same weights."""
        self._flush()

    def _flush(self) -> None:
        for optimizer in optimizers_of(self.model) if self.model.optimizer is not None else ():
            flush(optimizer)

    def _broadcast(self) -> None:
        replicas.build_optimizers(self.model, join())
        local = {id(v) for v in replicas.state_of(self.model) if self._local.holds(v)}
        replicas.broadcast_state(self.model, self.root_rank, join(), local)
        self._done = True


class MetricAverageCallback(metrics.EpochLogs):
    """Combine the metrics of an epoch and of `evaluate` over all ranks. Put it before callbacks that read metrics.

    All ranks must call `evaluate`; their data may differ in length.

    Args:
        device: not supported.
    """

    def __init__(self, device: str = ""):
        if device:
            raise ConfigError("MetricAverageCallback: device: not supported by hvdx. Leave it out.")
        super().__init__(join())

    def on_train_begin(self, logs: Logs = None) -> None:
        """Restore the model, in case an exception ended an `evaluate`."""
        restore_result(self.model)

    def on_test_begin(self, logs: Logs = None) -> None:
        """Combine the training metrics before validation overwrites them; make `evaluate` return combined metrics."""
        super().on_test_begin(logs)
        change_result(self.model, super().on_test_end)

    def on_test_end(self, logs: Logs = None) -> None:
        """Combine the validation metrics, unless `evaluate` has combined them already."""
        if not self.validated:
            super().on_test_end(logs)
        restore_result(self.model)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Replace this rank's metrics by those over all ranks."""
        if logs is not None:
            super().on_epoch_end(epoch, logs)


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Set the learning rate to `initial_lr * multiplier` in a range of epochs.

    When the rate changes, the velocity of an optimiser with momentum is scaled by new / old rate. This is equivalent to
    Horovod's correction of the momentum coefficient (Goyal et al. 2017, section 2.1), and works inside a graph. With
    Nesterov momentum, Horovod uses the corrected coefficient in the lookahead as well. For the same result, this
    callback adds (new / old - 1) * momentum * velocity to the weights after the step. It does not if velocities are
    rank-local and weights are not, because the weights of the ranks would diverge.

    Args:
        initial_lr: learning rate that is multiplied; None for the optimiser's rate when training begins.
        multiplier: function of the epoch, or a number m for `m ** (epoch - start_epoch)`.
        start_epoch: first epoch of the range.
        end_epoch: first epoch after the range; None for no end.
        staircase: change the rate at the start of each epoch; if False, at every batch, with fractions of epochs.
        momentum_correction: scale the velocity with the rate.
        steps_per_epoch: number of batches; needed if `staircase` is False and Keras cannot derive it.

    Raises:
        ConfigError: if the optimiser's learning rate is a schedule, or the number of batches is missing.
    """

    def __init__(
        self,
        initial_lr: float | None,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        # For Nesterov momentum: new / old of the last change of the rate, and the optimiser's step count at that time.
        self._ahead: tuple[float, int] | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Look up the learning rate and the length of an epoch, if they were not given."""
        optimizer = self._optimizer()
        if not isinstance(rate_of(optimizer), KerasVariable):
            raise ConfigError(
                f"{type(self).__name__}: the optimizer's learning rate is {rate_of(optimizer)!r}, which cannot "
                "be set. Give the optimizer a number."
            )
        if self.initial_lr is None:
            self.initial_lr = self._rate()
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ConfigError(
                    f"{type(self).__name__}: steps_per_epoch: expected a number where Keras cannot derive it, got "
                    "None. Give it."
                )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Record the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the rate in the scheduled epochs: at the first batch of each, or at every batch without `staircase`."""
        past = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or past:
            return
        if self.staircase:
            if batch == 0:
                self._set(self.multiplier(self.current_epoch))
        else:
            self._set(self.multiplier(self.current_epoch + batch / float(self.steps_per_epoch or 1)))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Add the rate to the logs."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _optimizer(self) -> keras.optimizers.Optimizer:
        return innermost(self.model.optimizer)

    def _rate(self) -> float:
        return float(self._optimizer().learning_rate)

    def _set(self, factor: float) -> None:
        optimizer = self._optimizer()
        old, new = self._rate(), float(self.initial_lr or 0.0) * factor
        optimizer.learning_rate = new
        if self.momentum_correction and getattr(optimizer, "momentum", False) and old not in (0.0, new):
            for velocity in momenta_of(optimizer):
                velocity.assign(velocity * (new / old))
            if getattr(optimizer, "nesterov", False):
                self._ahead = (new / old, int(optimizer.iterations))

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Correct the weights for Nesterov momentum, if the rate changed and a step was taken."""
        ahead, self._ahead = self._ahead, None
        optimizer = self._optimizer()
        if ahead is None or int(optimizer.iterations) == ahead[1]:
            return
        local = rank_local_ids(self.model)
        for weight, velocity in zip(trained_variables(optimizer), momenta_of(optimizer), strict=True):
            if (id(weight) in local) == (id(velocity) in local):
                weight.assign_add((ahead[0] - 1.0) * optimizer.momentum * velocity)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from `initial_lr / size` to `initial_lr` over the first epochs.

    Args:
        initial_lr: learning rate after the warm-up.
        warmup_epochs: number of epochs of the warm-up.
        momentum_correction, steps_per_epoch: see `LearningRateScheduleCallback`.
        verbose: 1 to print the rate at the end.

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD".
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        def multiplier(epoch: float) -> float:
            size = join().size
            # One step is added, so that the last step of the warm-up has the full rate.
            epoch += 1.0 / float(self.steps_per_epoch or 1)
            return (epoch * (size - 1) / warmup_epochs + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Add the rate to the logs, and print it at the end of the warm-up if `verbose`."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose and join().rank == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")


class BestModelCheckpoint(GuardedModelCheckpoint):
    """Save the best model so far, on rank 0.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: as for `keras.callbacks.ModelCheckpoint`.
        filepath: path of the file; may also be set as an attribute before training starts.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | os.PathLike[str] | None = None,
    ):
        # Keras checks the suffix here, and the path may be set later.
        placeholder = "unset.weights.h5" if save_weights_only else "unset.keras"
        super().__init__(placeholder, monitor, verbose, True, save_weights_only, mode, save_freq)
        self.filepath = filepath

    def on_train_begin(self, logs: Logs = None) -> None:
        """Check that the path is set."""
        if self.filepath is None:
            raise ConfigError("BestModelCheckpoint: filepath: expected a path before training starts, got None.")
        super().on_train_begin(logs)

    def saves_here(self) -> bool:
        """Return whether this is rank 0."""
        return join().rank == 0
