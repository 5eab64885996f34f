"""Records and limits of a fit on several ranks."""

# Tests: hvdx/keras/distribute.py, hvdx/keras/fit/record.py, hvdx/report/counters.py

import keras
import pytest

import hvdx
import hvdx.keras as hvd
from hvdx import comm as world
from hvdx.errors import ConfigError
from hvdx.report import timeline
from hvdx.report.records import read
from tests.ranks import models
from tests.ranks.models import STEPS
from tests.report.timeline import check


def shared(tmp_path):
    """Return rank 0's folder on all ranks."""
    return hvd.broadcast_object(tmp_path, 0)


def recorded(folder):
    """Return the only run in a folder, after all ranks have written it."""
    world.start().all_gather_object(None, "the record")
    (run,) = read(folder)
    assert (sorted(run.ranks), run.size, run.complete) == ([*range(hvdx.size())], hvdx.size(), True)
    assert len({rank.header["id"] for rank in run.ranks.values()}) == 1
    return run


def classifier(seed=0):
    return models.compiled(models.network(seed=seed), keras.optimizers.SGD(0.1, momentum=0.9), metrics=["accuracy"])


@pytest.mark.graph
@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        ("all_reduce:engine=mpi", {"exchanging"}),
        ("threshold:tau=0.001", {"computing", "encoding", "decoding", "exchanging"}),
        ("parameter_averaging:period=3", {"exchanging"}),
        ("parameter_server:servers=colocated", {"computing", "exchanging"}),
        ("auto", {"computing", "exchanging"}),
    ],
)
def test_record_has_the_parts_and_bytes_of_each_strategy(strategy, parts, tmp_path):
    folder, callback = shared(tmp_path), hvd.Distribute(strategy, record=shared(tmp_path))
    first = repr(callback.strategy)
    history = models.fit(classifier(), [callback], validation_data=models.data(16)).history
    run = recorded(folder)
    assert (run.strategy, run.header["batch"]) == (first, models.BATCH)
    assert run.header.get("chosen", first) == repr(callback.strategy)
    mine = run.ranks[hvdx.rank()]
    assert mine.steps["step"][-1] == mine.end["steps"] == callback.counters.steps
    assert {name for name, seconds in run.parts(skip=0).items() if seconds} - {"other", "waiting"} >= parts
    # What the adapters send in the flush at the end of an epoch is included.
    assert mine.steps["sent"].sum() == callback.counters.bytes_sent == mine.end["counters"]["sent"]
    assert [value for _, _, value in run.curve("val_accuracy")] == pytest.approx(history["val_accuracy"])
    assert [{e.logs["val_loss"] for e in r.epochs} for r in run.ranks.values()].count(set(history["val_loss"])) == 2
    check_timeline(run, callback)


def check_timeline(run, callback):
    """Check the offsets of the clocks, which are one clock on this machine, and the trace of two epochs."""
    start = callback._counting._recording._start
    starts = world.start().all_gather_object(start, "the clocks")
    clocks = run.ranks[hvdx.rank()].clocks
    # At the start, after the first epoch and after the last one.
    assert len(clocks) == 3
    for clock in clocks:
        assert abs(clock.offset - (start - starts[0])) <= clock.error + 1e-6
        assert clock.error < 0.1
    slices = check({"traceEvents": timeline.events(run)})
    for rank in run.ranks:
        names = [event["name"] for event in slices[rank, timeline.EPOCHS]]
        assert names == ["epoch 1", "flush", "evaluation", "epoch 2", "flush", "evaluation"]
        assert {"step 1", "exchanging"} <= {event["name"] for event in slices[rank, timeline.STEPS]}


@pytest.mark.sizes(1, 2)
def test_script_ends_with_the_costs_and_a_fit_with_nothing_to_do_says_so(capfd):
    """As `jobs` print them: a table on rank 0 of several, if fit prints anything at all."""
    model, callback = classifier(), hvd.Distribute("threshold:tau=0.001")
    x, y = models.data(models.BATCH)
    model.fit(x, y, batch_size=models.BATCH, epochs=2, verbose=2, callbacks=[callback])
    said = capfd.readouterr()
    assert said.out.count("time in communication") == (hvdx.size() > 1 and hvdx.rank() == 0)
    assert "nothing was trained" not in said.err
    assert ("Threshold(tau=0.001)" in callback.summary()) == (hvdx.size() > 1)
    model.fit(x, y, batch_size=models.BATCH, epochs=2, initial_epoch=2, verbose=2, callbacks=[callback])
    said = capfd.readouterr()
    assert ("hvdx: nothing was trained: 2 epochs of this fit were trained before." in said.err) == (hvdx.rank() == 0)
    assert "time in communication" not in said.out


def test_record_of_two_optimizers_has_the_bytes_of_both(tmp_path):
    folder, callback = shared(tmp_path), hvd.Distribute("threshold:tau=0.001", record=shared(tmp_path))
    model = models.TwoPlayers()
    model.compile(momentum=0.5)
    models.fit(model, [callback], epochs=1)
    mine = recorded(folder).ranks[hvdx.rank()]
    assert mine.steps["sent"].sum() == callback.counters.bytes_sent > 0


def test_rank_that_cannot_write_is_an_error_on_all(tmp_path):
    (tmp_path / "file").write_text("")
    callback = hvd.Distribute(record=tmp_path / ("file" if hvdx.rank() == 1 else "folder"))
    with pytest.raises(ConfigError, match="rank 1: the record: expected a folder that can be written"):
        models.fit(classifier(), [callback])


def test_minutes_of_rank_0_end_the_fit_on_all(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDX_LIMIT", "minutes:0.01")
    folder, callback = shared(tmp_path), hvd.Distribute("all_reduce:engine=mpi", record=shared(tmp_path))
    if hvdx.rank() == 0:
        callback._limit.minutes = 1e-6
    else:
        callback._limit.minutes = 1e6
    assert len(models.fit(classifier(), [callback], epochs=3).history["loss"]) == 1
    assert {rank.end["reason"] for rank in recorded(folder).ranks.values()} == {"limit"}
    assert all(rank.end["memory"] > 1e8 for rank in recorded(folder).ranks.values())


@pytest.mark.parametrize("strategy", ["all_reduce:engine=mpi", "threshold:tau=0.001"])
def test_steps_end_all_ranks_with_complete_records(strategy, tmp_path, monkeypatch):
    monkeypatch.setenv("HVDX_LIMIT", f"steps:{STEPS + 1}")
    folder, callback = shared(tmp_path), hvd.Distribute(strategy, record=shared(tmp_path))
    with pytest.raises(SystemExit) as ended:
        models.fit(classifier(), [callback])
    assert ended.value.code == 0
    run = recorded(folder)
    assert {(rank.end["reason"], rank.end["steps"]) for rank in run.ranks.values()} == {("limit", STEPS + 1)}
    mine = run.ranks[hvdx.rank()]
    assert mine.steps["sent"].sum() == mine.end["counters"]["sent"]


def test_steps_are_refused_for_asynchronous_workers(monkeypatch):
    monkeypatch.setenv("HVDX_LIMIT", "steps:3")
    with pytest.raises(ConfigError, match="HVDX_LIMIT=steps:3: expected epochs or minutes under ParameterServer"):
        hvd.Distribute("parameter_server:servers=colocated")
