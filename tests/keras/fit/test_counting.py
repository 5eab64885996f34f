"""Counts of the steps and epochs of a fit, without training."""

from types import SimpleNamespace

from hvdx.comm import LocalComm, progress
from hvdx.keras.fit.counting import Counting
from hvdx.keras.fit.recording import Recording
from hvdx.strategies import resolve


def counting(strategy="all_reduce"):
    made = Counting(LocalComm(), SimpleNamespace(strategy=resolve(strategy)), Recording())
    made.set_params({"epochs": 3, "steps": 5})
    made.on_train_begin()
    return made


def test_steps_before_a_checkpoint_in_mid_epoch_are_no_steps_of_the_fit():
    counts = counting()
    assert not counts.trained
    counts.on_epoch_begin(1)
    for batch in (3, 4):
        counts.on_train_batch_begin(batch)
        counts.on_train_batch_end(batch)
    assert (counts.counters.steps, counts.steps_of_fit) == (5, 2)
    assert (counts.epoch, counts.trained, counts.ended) == (1, True, False)
    counts.on_epoch_begin(2)
    counts.on_train_batch_begin(0)
    counts.on_train_batch_end(0)
    assert (counts.counters.steps, counts.steps_of_fit, counts.counters.steps_of_epoch) == (6, 3, 1)
    assert counts.ended
    counts.on_train_begin()
    assert (counts.counters.steps, counts.steps_of_fit, counts.trained) == (0, 0, False)


def test_last_execution_of_several_steps_has_those_of_the_epoch():
    for strategy, expected in (("all_reduce", 5), ("parameter_server", 6)):
        counts = counting(strategy)
        counts.on_epoch_begin(0)
        counts.on_train_batch_begin(3)
        counts.on_train_batch_end(5)
        assert counts.counters.steps == expected, strategy


def test_position_is_that_of_the_step(monkeypatch):
    seen = []
    monkeypatch.setattr(progress, "step", lambda *position: seen.append(position))
    counts = counting()
    counts.on_epoch_begin(1)
    counts.on_train_batch_begin(2)
    counts.on_test_batch_begin(0)
    counts.on_train_end()
    assert seen == [("step 3 of epoch 2", (1, 2)), ("step 1 of validation in epoch 2",), ("",)]
