"""What `Recording` receives in a fit, with stand-ins for the other parts."""

import time
from types import SimpleNamespace

import keras
import pytest

from hvdx.comm import LocalComm
from hvdx.costs.types import Link
from hvdx.keras.fit.record import Record
from hvdx.strategies.telemetry import Telemetry
from tests.strategies.virtual import on_all


class Calls:
    """Recording that keeps its calls."""

    on = True

    def __init__(self):
        self.describe, self.epochs, self.ends, self.offsets = None, [], [], []

    def begin(self, rank, adapters, describe):
        self.describe = describe

    def agree(self, offered):
        pass

    def seconds(self):
        return time.perf_counter()

    def add_offset(self, offset):
        self.offsets.append(offset.seconds)

    def end_epoch(self, *epoch):
        self.epochs.append(epoch)

    def end(self, reason, counters):
        self.ends.append((reason, counters["steps"]))


def record(comm, ended=False, reached=False, logs_cost=False, network=None):
    calls, costs = Calls(), [Telemetry(steps=3), Telemetry(steps=3)]
    exchanges = [SimpleNamespace(), SimpleNamespace(network=network)]
    attachment = SimpleNamespace(
        strategy="the first", adapters=[SimpleNamespace(exchange=e) for e in exchanges], logs_cost=logs_cost,
        costs=lambda: costs,
    )  # fmt: skip
    part = Record(
        comm,
        calls,
        SimpleNamespace(steps=7),
        attachment,
        SimpleNamespace(ended=ended, begin=(0, 4)),
        SimpleNamespace(so_far=lambda: Telemetry(steps=3)),
        SimpleNamespace(reached=reached),
    )
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    part.set_model(model)
    part.set_params({"epochs": 2, "steps": 9})
    part.on_train_begin()
    return part, calls, attachment


@pytest.mark.parametrize(("size", "steps"), [(1, 9), (2, 7)])
def test_description_has_the_first_strategy_the_steps_of_all_ranks_and_the_link(size, steps):
    def run(comm):
        _, calls, attachment = record(comm, network=Link(bandwidth=5.0, latency=0.1))
        attachment.strategy = "its successor"
        found = calls.describe()
        return [found[name] for name in ("rank", "size", "strategy", "epochs", "steps", "link", "begin")]

    link = {"bandwidth": 5.0, "latency": 0.1}
    assert on_all(size, run) == [[rank, size, "'the first'", 2, steps, link, [0, 4]] for rank in range(size)]


@pytest.mark.parametrize(
    ("ended", "reached", "reason"), [(True, True, "done"), (False, True, "limit"), (False, False, "stopped")]
)
def test_end_has_its_reason_and_the_costs_of_all_optimisers(ended, reached, reason):
    part, calls, _ = record(LocalComm(), ended=ended, reached=reached)
    part.on_train_end()
    assert calls.ends == [(reason, 3)]


@pytest.mark.parametrize("logs_cost", [False, True])
def test_line_of_an_epoch_has_costs_if_the_logs_show_them(logs_cost):
    part, calls, _ = record(LocalComm(), logs_cost=logs_cost)
    part.on_epoch_end(0, {"loss": 1.0})
    ((epoch, logs, costs),) = calls.epochs
    assert (epoch, logs, bool(costs)) == (1, {"loss": 1.0}, logs_cost)


@pytest.mark.parametrize(("records", "expected"), [(True, [1, 2, 3, 3, 4, 4, 5, 6]), (False, [0] * 8)])
def test_clocks_are_compared_at_the_start_then_after_1_2_4_epochs_and_the_last(records, expected):
    def run(comm):
        part, calls, _ = record(comm)
        calls.on = records
        part.agree([])
        # Rank 0's disk becomes full: it must answer rank 1 all the same.
        calls.on = comm.rank == 1
        counts = [len(calls.offsets)]
        for epoch in range(7):
            if epoch in (5, 6):
                part._counting.ended = True
            part.on_epoch_end(epoch, {})
            counts.append(len(calls.offsets))
        return counts

    # After the start, and after epochs 1 to 7; the sixth is the last one of one fit, the seventh of another.
    assert on_all(2, run) == [expected] * 2
