"""Distributed training by one added line: `model.fit(..., callbacks=[hvdx.keras.Distribute()])`."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any, Literal

import keras

from hvdx.comm import Comm
from hvdx.comm.mesh import mesh_of
from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras import backend
from hvdx.keras.adapters import finite
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.adapters.rank_local import Owner, declared, rank_local_ids
from hvdx.keras.backend import tf
from hvdx.keras.fit import callback_list, data, limits, replicas
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.fit.balance import Balance
from hvdx.keras.fit.comparison import Comparison
from hvdx.keras.fit.counting import Counting
from hvdx.keras.fit.limits import Limit
from hvdx.keras.fit.metrics import EpochLogs
from hvdx.keras.fit.noise import Noise
from hvdx.keras.fit.part import Part, Parts
from hvdx.keras.fit.positions import all_gather_at
from hvdx.keras.fit.record import Costs, Record
from hvdx.keras.fit.recording import Recording
from hvdx.keras.fit.state import Declared, State
from hvdx.keras.fit.stepped_attachment import SteppedAttachment
from hvdx.keras.fit.sync_callback import Schedules, SyncCallback
from hvdx.keras.gathering import PlainCopies
from hvdx.keras.joining import join
from hvdx.keras.saving import Saving
from hvdx.keras.seams.frames import calling_list, epoch_iterator, running_fits
from hvdx.keras.seams.iterators import dataset_of, number_of_batches
from hvdx.keras.seams.models import initial_epoch, set_initial_epoch
from hvdx.keras.survival import Survival
from hvdx.keras.types import Logs
from hvdx.keras.weight_parts import by_ranks, has_parts
from hvdx.log import Log
from hvdx.report.counters import Counters
from hvdx.strategies import Strategy, resolve
from hvdx.strategies.contract import refuse_unless_it_survives
from hvdx.strategies.telemetry import Telemetry

_log = Log(__name__)


class Nested(Part):
    """Refuse a nested `fit` with `Distribute`: its end would detach the optimiser of the outer one."""

    def on_train_begin(self, logs: Logs = None) -> None:
        """Refuse the `fit`.

        Raises:
            ConfigError: if an outer `fit` with `Distribute` is training the model, or a model that it is a part of.
        """
        model = self.model
        adapters = [adapter_of(optimizer) for optimizer in optimizers_of(model)]
        outer = [a.owner.model for a in adapters if a is not None and a.owner is not None]
        # After an exception the optimiser is attached too, but the `fit` is not running.
        if any(running_fits(other) > (other is model) for other in outer):
            raise ConfigError.on_all_ranks(
                f"fit: model {model.name}: expected one fit with Distribute at a time, got one inside another. "
                "Do: train the model again after the outer fit has ended."
            )


class Settings(Part):
    """Compare the settings of the ranks, and make the first epoch and the orders of data the same."""

    def __init__(self, limit: Limit):
        super().__init__()
        self._limit = limit

    def offer(self) -> dict[str, object]:
        """Return the settings of this rank."""
        return {
            "steps_per_execution": self.model.steps_per_execution,
            "epochs": self.params.get("epochs"),
            "built": self.model.built,
            limits.VARIABLE: self._limit.text,
            "initial_epoch": initial_epoch(self.model),
            "shares": data.state(),
        }

    def agree(self, offered: list[dict[str, Any]]) -> None:
        """Compare the settings.

        Raises:
            ReplicaError: on all ranks, if they differ.
        """
        for name in ("steps_per_execution", "epochs", "built", limits.VARIABLE):
            values = [theirs[name] for theirs in offered]
            if len(set(values)) > 1:
                raise ReplicaError(f"fit: {name} differs between ranks: {values}. Every rank must be given the same.")
        data.agree_on_orders([theirs["shares"] for theirs in offered])
        set_initial_epoch(self.model, offered[0]["initial_epoch"])


class Start(Part):
    """Broadcast weights and optimiser state of rank 0, also to layers that are built in the first step."""

    def __init__(self, comm: Comm, sync: SyncCallback, attachment: Attachment):
        super().__init__()
        self._comm, self._sync, self._attachment = comm, sync, attachment
        self._weights = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        self._weights = 0

    def agree(self, offered: list[object]) -> None:
        """Broadcast the state of rank 0, to which `Checkpoint` may have restored it before."""
        if self.model.built:
            # Rank-local state from an earlier fit or a checkpoint is not broadcast, so that a rank's momenta match its
            # residual. In mid-epoch, non-trainable weights are rank-local too.
            within = bool(self._sync.steps_done)
            self._broadcast(rank_local_ids(self.model, within, of=lambda _, adapter: adapter.has_state))

    def end_first_step(self) -> None:
        """Broadcast again if the first step has built layers."""
        if len(self.model.weights) > self._weights:
            for adapter in self._attachment.adapters:
                adapter.prepare_broadcast()
            self._broadcast({id(v) for part in declared(self.model) for v in part})

    def _broadcast(self, excluded: Collection[int]) -> None:
        replicas.broadcast_state(self.model, 0, self._comm, excluded)
        self._weights = len(self.model.weights)


class Evaluation(Part):
    """Compare positions at a validation and at the end of an epoch; all ranks of a group evaluate all its batches.

    With split layers, a rank that has fewer batches than its group goes on with batches that do not count.
    """

    def __init__(self, comm: Comm, counting: Counting):
        super().__init__()
        self._comm, self._counting = comm, counting
        # Number of batches that do not count, after this rank's own.
        self._missing = 0
        self._filler: tf.data.Dataset | None = None

    def on_test_begin(self, logs: Logs = None) -> None:
        """Compare the numbers of batches in this rank's group.

        Raises:
            ConfigError: on all ranks, if a number is unknown.
        """
        everyone = all_gather_at(self._comm, f"validation in epoch {self._counting.epoch + 1}", self._batches())
        self._missing = 0
        numbers = [number for number in everyone if number is not None]
        if not numbers:
            return
        if min(numbers) < 0:
            raise ConfigError.on_all_ranks(
                f"evaluation with split layers: expected a known number of batches on all ranks, got none on rank "
                f"{numbers.index(-1)}. Give fit validation_steps=, or evaluate steps=."
            )
        mesh = mesh_of(self._comm)
        mine = mesh.groups[mesh.index]
        self._missing = max(numbers[rank] for rank in mine) - numbers[self._comm.rank]

    def _batches(self) -> int | None:
        """Return this rank's number of batches: -1 if it is unknown, None for a model without split layers."""
        if not has_parts(self.model):
            return None
        iterator = epoch_iterator(self)
        dataset = dataset_of(iterator)
        self._filler = None if dataset is None else keras.tree.map_structure(_one_row, dataset.element_spec)
        number = number_of_batches(iterator)
        return -1 if number is None else number

    def on_test_end(self, logs: Logs = None) -> None:
        """Take this rank's part in the batches that others of its group still have."""
        missing, self._missing = self._missing, 0
        if missing:
            values = [v.numpy() for v in self.model.metrics_variables]
            for _ in range(missing):
                self.model.test_step(self._filler)
            for variable, value in zip(self.model.metrics_variables, values, strict=True):
                variable.assign(value)
        all_gather_at(self._comm, f"the end of validation in epoch {self._counting.epoch + 1}")

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Compare the positions."""
        all_gather_at(self._comm, f"the end of epoch {epoch + 1}")


def _one_row(spec: tf.TypeSpec) -> tf.Tensor:
    """Return a tensor of a batch with one sample of zeros; Keras cannot reduce the loss of an empty batch."""
    return tf.zeros([1, *(extent or 1 for extent in spec.shape[1:])], spec.dtype)


class Checks(Part):
    """Check that the weights are finite and have the same bits on all ranks: after each epoch, and every few steps.

    Args:
        every: `check_every` of `Distribute`.
        sync: knows whether a `TerminateOnNaN` stops the fit, which is no error then.

    Raises:
        ConfigError: if `every` is something else, or a number of steps under an asynchronous strategy.
    """

    def __init__(
        self,
        comm: Comm,
        every: int | Literal["epoch"] | None,
        counting: Counting,
        attachment: Attachment,
        sync: SyncCallback,
    ):
        super().__init__()
        if every not in ("epoch", None) and not (isinstance(every, int) and every > 0):
            raise ConfigError(f"check_every: expected 'epoch', a positive number of steps or None, got {every!r}.")
        if attachment.strategy.asynchronous and isinstance(every, int):
            raise ConfigError(
                f"check_every={every}: under {attachment.strategy!r}, workers have different weights until the end of "
                "an epoch. Use check_every='epoch'."
            )
        self._comm, self._every, self._counting, self._attachment = comm, every, counting, attachment
        self._sync = sync

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Check the weights if that is due."""
        if isinstance(self._every, int) and (batch + 1) % self._every == 0:
            for adapter in self._attachment.adapters:
                adapter.drain()
            self._attachment.rejoin()
            self._check(f"after step {batch + 1} of epoch {self._counting.epoch + 1}")
            for adapter in self._attachment.adapters:
                adapter.go_on()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Check the weights; if `every` is None, only whether they are finite."""
        self._check(f"after epoch {epoch + 1}")

    def _check(self, when: str) -> None:
        firsts = [adapter.first_bad() for adapter in self._attachment.adapters]
        bad = finite.check(self.model.trainable_weights, firsts, self._comm, when, self._sync.terminates)
        if bad or self._every is None:
            return
        for ranks, some in by_ranks(replicas.shared_state_of(self.model), self._comm):
            replicas.check_identical(some, ranks, when)


class Limiting(Part):
    """End the fit after an epoch, or the process after a step.

    Raises:
        ConfigError: if the limit is a number of steps, which asynchronous workers do not take together.
    """

    alone = True

    def __init__(
        self, comm: Comm, limit: Limit, counting: Counting, attachment: Attachment, costs: Costs, record: Record
    ):
        super().__init__()
        if attachment.strategy.asynchronous and limit.steps and comm.size > 1:
            raise ConfigError(
                f"{limits.VARIABLE}={limit.text}: expected epochs or minutes under {attachment.strategy!r}, "
                "whose workers take different numbers of steps. Set another limit, or train with one worker."
            )
        self._comm, self._limit, self._counting = comm, limit, counting
        self._attachment, self._costs, self._record = attachment, costs, record

    def on_train_begin(self, logs: Logs = None) -> None:
        self._limit.begin()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """End this process after the steps of the limit, as all ranks do after the same step. Collective then."""
        steps = self._counting.steps_of_fit
        if not self._limit.after_step(steps):
            return
        self._counting.end_steps()
        self._attachment.end_steps()
        self._limit.reach()
        self._costs.finish()
        self._record.end("limit")
        self._say(f"the process ends after {steps} steps")
        raise SystemExit(0)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """End the fit if the limit of rank 0 is reached. Collective if there is a limit."""
        over = self._limit.after_epoch()
        if self._limit.text and self._comm.all_gather_object(over, "the limit of the fit")[0]:
            self._limit.reach()
            self.model.stop_training = True
            if not self._counting.ended:
                self._say(f"the fit ends after epoch {epoch + 1}")

    def _say(self, what: str) -> None:
        if self._comm.rank == 0:
            _log.info(f"{limits.VARIABLE}={self._limit.text}: {what}.", head="\nhvdx: ")


class Distribute(Parts):
    """Train one model on all the processes that were started.

    At the start of `fit` all ranks receive the weights and optimiser state of rank 0, and the optimiser is attached to
    the strategy in place. At the end of `fit` it is detached. During `fit`:

    - metrics, those of validation included, are computed over all ranks;
    - non-trainable weights, such as moving averages, are averaged at the end of each epoch (see `local`, `summed`);
    - every batch of every rank is trained; a rank that has no more takes part in the steps of the others with weight 0.
      Under an asynchronous strategy an epoch ends when all ranks together have taken their steps;
    - callbacks that write (checkpoints, TensorBoard, CSV, MLflow, W&B, the progress bar) run on rank 0 only;
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
        local: Owner | Sequence[Owner] | None = None,
        summed: Owner | Sequence[Owner] | None = None,
    ):
        super().__init__()
        self._arguments = strategy, check_every, record, local, summed
        strategy = resolve(strategy)
        limit, recording = limits.from_environment(), Recording(record)
        comm: Comm = join(strategy)
        strategy.check(comm)
        refuse_unless_it_survives(strategy, comm)
        self.check_every, self._comm, self._limit = check_every, comm, limit
        kind = Attachment if backend.name() == "tensorflow" else SteppedAttachment
        self._attachment = attachment = kind(comm, strategy, recording)
        self._counting = counting = Counting(comm, attachment, recording)
        self._costs = costs = Costs(comm, counting, attachment)
        self._sync = sync = SyncCallback(comm, counting, attachment, self)
        self._copies, self._saving = PlainCopies(), Saving(comm, attachment)
        written = Record(comm, recording, sync, attachment, counting, costs, limit)
        # The order in which the hooks of the parts run; see `Part`.
        order: list[Part] = [
            Nested(),  # no fit inside another one
            Declared(local, summed),  # the weights of `local` and `summed`
            counting,  # of steps and epochs
            Settings(limit),  # the same arguments of `fit` and orders of data on all ranks
            sync,  # length of the epochs, and their end
            Schedules(comm, sync),  # a remark on learning-rate schedules
            Noise(comm.world_ranks[comm.rank]),  # random numbers of each rank
            Evaluation(comm, counting),  # validation and the end of an epoch, with all ranks
            Start(comm, sync, attachment),  # weights of rank 0
            State(comm),  # weights without a gradient
            EpochLogs(comm),  # metrics over all ranks
            attachment,  # optimisers and training function
            Balance(comm, attachment, recording),  # rows of each rank by its speed
            Comparison(comm, attachment),  # of data, models and constants
            Checks(comm, check_every, counting, attachment, sync),  # the same, finite weights on all ranks
            costs,  # of the exchanges
            self._copies,  # plain copies of models with split layers
            written,  # the record
            self._saving,  # the checkpoint of `hvdx run --checkpoint`
            Limiting(comm, limit, counting, attachment, costs, written),  # the end at `HVDX_LIMIT`
        ]
        self.parts = self.called = [part for part in order if comm.size > 1 or part.alone]
        self._survival = Survival(comm, attachment, sync, self)
        self._in_steps = False

    def __copy__(self) -> Distribute:
        """Return a fresh callback with the same arguments: a fit leaves state, and the communicator has no copy."""
        return Distribute(*self._arguments)

    def __deepcopy__(self, memo: dict[int, object]) -> Distribute:
        return self.__copy__()

    @property
    def strategy(self) -> Strategy:
        """Strategy of the fit; a provisional one is replaced by its successor."""
        return self._attachment.strategy

    @property
    def counters(self) -> Counters:
        """Counters of the last fit on this rank."""
        return self._counting.counters

    def cost(self) -> Telemetry:
        """Return the telemetry of the exchanges of this fit so far, on this rank."""
        return self._costs.so_far()

    def summary(self) -> str:
        """Return the table of the last fit on this rank: strategy, steps, seconds, bytes, and time in communication."""
        return self._costs.table()

    def set_model(self, model: keras.Model) -> None:
        """Arrange the callback list; Keras calls this before it makes the training function."""
        if not isinstance(model, keras.Model):
            raise ConfigError.on_all_ranks(
                f"model: expected a model of Keras 3, got {type(model).__module__}.{type(model).__qualname__}. Do: "
                "make it with `import keras` in place of tf_keras; for tf.keras, unset TF_USE_LEGACY_KERAS."
            )
        super().set_model(model)
        found = calling_list(self)
        added = None if found is None else self._saving.add_checkpoint(found)
        found = found if self._comm.size > 1 else None
        if found is not None:
            self._copies.serve(found.callbacks)
            callback_list.show_costs(found.callbacks, self._costs.numbers)
            self._survival.arrange(found, EpochLogs)
        if self._comm.size > 1:
            # Keras calls the hooks of `SyncCallback` if it is in the list.
            others = [part for part in self.parts if part is not self._sync]
            self.called = others if found is not None else [*others, self._sync]
        if added is not None:
            added.set_model(model)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Begin a fit; `SyncCallback` lets the parts agree once all other callbacks have begun."""
        self._survival.begin()
        super().on_train_begin(logs)
        if self._comm.size == 1:
            self.agree([self.offer()])

    def agree(self, offered: list[list[object]]) -> None:
        """Begin alike on all ranks; a spare waits here until it is a rank."""
        super().agree(offered)
        self._survival.wait()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._in_steps = True
        self._survival.begin_epoch(epoch)
        super().on_epoch_begin(epoch, logs)
        self._survival.take_over(None)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._attachment.show_weights(isinstance(self.check_every, int) or self._sync.has_others)
        super().on_train_batch_end(batch, logs)
        self._survival.take_over(self._counting.epoch)

    def end_steps(self) -> None:
        """End the steps of an epoch, once."""
        if self._in_steps:
            self._in_steps = False
            super().end_steps()

    def on_test_begin(self, logs: Logs = None) -> None:
        """Begin a validation, with the same weights on all ranks."""
        self.end_steps()
        self._survival.deal()
        super().on_test_begin(logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """End an epoch: replace this rank's metrics by those of all ranks, and check the replicas."""
        self.end_steps()
        super().on_epoch_end(epoch, logs)
        self._survival.end_epoch(epoch, dict(logs or {}))

    def on_train_end(self, logs: Logs = None) -> None:
        """End a fit; the rank that has become rank 0 first does what is left of the last epoch."""
        self._survival.begin_end()
        super().on_train_end(logs)
        self._survival.end()

    def end_fit(self, logs: Logs = None) -> None:
        """Where ranks may die, the rank that has become rank 0 runs the last callbacks again. Collective."""
        self._survival.end_fit()
