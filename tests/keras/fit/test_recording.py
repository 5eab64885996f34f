"""The record of a `fit` on one worker, the recorder by itself, and the limits of a fit."""

# Tests: hvdx/keras/fit/description.py, hvdx/keras/fit/limits.py

import os
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
import hvdx.keras as hvd
from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras.fit import description, limits
from hvdx.keras.fit.recording import Recording
from hvdx.report.lines import Writer
from hvdx.report.records import read
from hvdx.strategies.telemetry import ServerTelemetry, StalenessHistogram, Telemetry

STEPS, BATCH = 4, 3


@pytest.fixture(autouse=True)
def eager():
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


def fit(*callbacks, epochs=2, steps_per_execution=1, **options):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(), "mse", steps_per_execution=steps_per_execution)
    x, y = np.ones((STEPS * BATCH, 4), "float32"), np.zeros((STEPS * BATCH, 2), "float32")
    batches = hvdx.shard((x, y), BATCH)
    return model.fit(batches, epochs=epochs, verbose=0, callbacks=list(callbacks), **options)


class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise RuntimeError("on purpose")


class Stops(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


# -- a fit ------------------------------------------------------------------------------------------------------------


def test_fit_of_one_worker_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDX_SEED", "7")
    monkeypatch.setenv("HVDX_RECORD", str(tmp_path))
    x, y = np.ones((2, 4), "float32"), np.zeros((2, 2), "float32")
    history = fit(hvd.Distribute("threshold"), validation_data=(x, y)).history
    (run,) = read(tmp_path)
    assert run.complete
    assert run.ranks[0].end["reason"] == "done"
    assert run.ranks[0].steps["step"].tolist() == list(range(1, 2 * STEPS + 1))
    assert (run.ranks[0].steps["seconds"] > 0).all()
    assert np.diff(run.ranks[0].steps["time"]).min() > 0
    assert [value for _, _, value in run.curve("val_loss")] == history["val_loss"]
    assert [[name for name, _, _ in epoch.spans] for epoch in run.epochs] == [["flush", "evaluation"]] * 2
    times = [time for e in run.epochs for time in (e.begin, *(t for _, *span in e.spans for t in span), e.time)]
    assert times == sorted(times)
    assert run.ranks[0].clocks == []
    expected = {"rank": 0, "size": 1, "strategy": "Threshold()", "seed": 7, "epochs": 2, "steps": STEPS, "batch": BATCH}
    expected["backend"] = "tensorflow"
    assert {name: run.header[name] for name in expected} == expected
    assert run.header["versions"]["tensorflow"] == tf.__version__
    assert run.header["model"]["tensors"] == [[4, 2], [2]]
    assert run.header["optimizer"] == {"name": "Adam", "momentum": 0.9, "slots": 2}


def test_calls_of_several_steps_and_several_fits_are_recorded(tmp_path):
    callback = hvd.Distribute(record=tmp_path)
    fit(callback, epochs=1, steps_per_execution=2)
    fit(callback, Stops())
    first, second = read(tmp_path)
    assert first.ranks[0].steps["step"].tolist() == [2, 4]
    assert second.ranks[0].steps["step"].tolist() == list(range(1, STEPS + 1))
    assert [run.ranks[0].end["reason"] for run in (first, second)] == ["done", "stopped"]


def test_fit_that_fails_keeps_its_rows(tmp_path):
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(hvd.Distribute(record=tmp_path), Fails())
    fit(hvd.Distribute(record=tmp_path), epochs=1)
    first, second = read(tmp_path)
    assert (first.ranks[0].end, first.ranks[0].steps["step"].tolist()) == (None, [1, 2, 3])
    assert second.complete


def test_record_that_cannot_be_written_is_an_error_or_a_warning(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"expected a folder that can be written, got .*Set HVDX_RECORD"):
        fit(hvd.Distribute(record=tmp_path / "file"))
    with pytest.raises(ConfigError, match="record: expected a folder or None, got 3"):
        hvd.Distribute(record=3)

    def full(self, kind, **values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Writer, "write", full)
    assert len(fit(hvd.Distribute(record=tmp_path / "full")).history["loss"]) == 2
    assert capsys.readouterr().err.count("records no more") == 1


def test_second_fit_on_a_full_disk_trains_without_a_record(tmp_path, monkeypatch, capsys):
    write = os.write

    def full(file, data):
        if os.readlink(f"/proc/self/fd/{file}").startswith(str(tmp_path)):
            raise OSError(28, "No space left on device")
        return write(file, data)

    (tmp_path / "rank-0.jsonl").write_text('{"kind":"steps","step":[9')  # what the first fit could still write
    monkeypatch.setattr(os, "write", full)
    assert len(fit(hvd.Distribute(record=tmp_path)).history["loss"]) == 2
    assert capsys.readouterr().err.count("records no more") == 1


def test_batch_size_is_that_of_arrays_and_datasets():
    class Asks(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.found = description.batch_size(self)

    x, y = np.ones((10, 4), "float32"), np.zeros((10, 2), "float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    ragged = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).prefetch(1)
    rows = tf.data.Dataset.from_generator(
        lambda: iter([(x, y)]), output_signature=(tf.TensorSpec([None, 4]), tf.TensorSpec([None, 2]))
    )
    for data, options, expected in (((x, y), {"batch_size": 4}, 4), ((ragged,), {}, 4), ((rows,), {}, None)):
        model.fit(*data, **options, verbose=0, callbacks=[asks := Asks()])
        assert asks.found == expected


# -- the recorder -----------------------------------------------------------------------------------------------------


def recorder(folder, adapters):
    recording = Recording(folder, interval=0.0)
    recording.begin(0, lambda: adapters, lambda: {"rank": 0, "size": 1})
    return recording


def test_parts_are_differences_of_the_counters_of_all_exchanges(tmp_path):
    one, two = Telemetry(elements=2, density=0.5), ServerTelemetry(elements=1, density=0.1)
    recording = recorder(tmp_path, [SimpleNamespace(telemetries=[one]), SimpleNamespace(telemetries=[two])])
    for step in range(1, 4):
        recording.step_begins()
        one.encoding, one.computing, two.exchanging = one.encoding + 1e-6, one.computing + 1.0, two.exchanging + 2e-6
        one.sent, two.sent, two.staleness = one.sent + 10, two.sent + 1, two.staleness + StalenessHistogram({step: 2})
        time.sleep(1e-4)
        recording.step_ends(step)
    recording.steps_end()
    one.sent, one.encoding = one.sent + 1000, one.encoding + 5.0
    recording.end_epoch(1, {}, {})
    recording.end("done", {})
    steps = read(tmp_path)[0].ranks[0].steps
    # A flush adds its bytes to the last call, and its time to none.
    assert steps["sent"].tolist() == [11, 11, 1011]
    np.testing.assert_allclose(steps["encoding"], [1e-6] * 3)
    np.testing.assert_allclose(steps["exchanging"], [2e-6] * 3)
    assert steps["staleness"].tolist() == [1, 2, 3]
    assert steps["density"].tolist() == [0.5] * 3
    # The time between two exchanges includes that between two calls, so it is cut.
    np.testing.assert_allclose(steps["computing"], steps["seconds"] - 3e-6, atol=2e-7)


def test_recording_takes_less_than_half_a_percent_of_a_step_of_20_ms(tmp_path):
    counts = ServerTelemetry(elements=2, density=0.5)
    recording, steps = recorder(tmp_path, [SimpleNamespace(telemetries=[counts])]), 5_000
    begin = time.process_time()
    for step in range(1, steps + 1):
        recording.step_begins()
        counts.encoding, counts.sent = counts.encoding + 1e-4, counts.sent + 1000
        counts.staleness = counts.staleness + StalenessHistogram({step % 4: 1})
        recording.step_ends(step)
        if step % 50 == 0:
            recording.write_if_due()
    # As on steps of 20 ms, which are written once a second.
    each = (time.process_time() - begin) / steps
    print(f"{1e6 * each:.1f} us a step")
    assert each < 0.005 * 0.020
    recording.end("done", {})
    assert len(read(tmp_path)[0].ranks[0].steps["step"]) == steps


def test_counters_in_the_graph_are_shared_evenly_until_the_strategy_changes(tmp_path):
    counts = Telemetry()
    recording = recorder(tmp_path, [SimpleNamespace(telemetries=None, cost=lambda: counts)])
    for step in range(1, 7):
        recording.step_begins()
        recording.step_ends(step)
        counts.sent += 10 if step % 2 else 0
    recording.write_if_due()
    assert len(recording._rows) == 1
    recording.before_switch()
    counts.sent = 0
    recording.switch("AllReduce()")
    recording.step_begins()
    counts.sent += 7
    recording.step_ends(7)
    recording.end("done", {})
    (run,) = read(tmp_path)
    assert run.ranks[0].steps["sent"].tolist() == [5, 5, 5, 5, 5, 5, 7]
    assert (run.ranks[0].traced, run.header["chosen"]) == ([0, 6], "AllReduce()")


def test_ranks_agree_on_recording(tmp_path):
    recording = recorder(tmp_path, [])
    with pytest.raises(ReplicaError, match=r"got none on ranks \[1\]"):
        recording.agree([recording.state, (False, "", "")])
    recording = recorder(tmp_path, [])
    with pytest.raises(ConfigError, match="rank 1: no disk") as found:
        recording.agree([recording.state, (True, "no disk", "x")])
    assert found.value.collective
    recording = recorder(tmp_path, [])
    recording.agree([(True, "", "first"), recording.state])
    assert recording.state[2] == "first"
    recording.close()


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["3", "epochs", "epochs:0", "epochs:1.5", "minutes:-1", "minutes:nan", "hours:1", ":"])
def test_limit_with_an_error_is_refused(text, monkeypatch):
    monkeypatch.setenv("HVDX_LIMIT", text)
    with pytest.raises(ConfigError, match=r"HVDX_LIMIT: expected epochs:N, minutes:T or steps:N .*, got"):
        hvd.Distribute()


@pytest.mark.parametrize(("text", "epochs"), [("epochs:2", 2), ("minutes:0.0000001", 1), ("minutes:60", 3), ("", 3)])
def test_limit_ends_the_fit_after_an_epoch(text, epochs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HVDX_LIMIT", text)
    assert len(fit(hvd.Distribute(record=tmp_path), epochs=3).history["loss"]) == epochs
    (run,) = read(tmp_path)
    assert run.complete
    assert run.ranks[0].end["reason"] == ("done" if epochs == 3 else "limit")
    assert (f"HVDX_LIMIT={text}: the fit ends after epoch {epochs}" in capsys.readouterr().err) == (epochs < 3)


def test_limit_of_steps_ends_the_process(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDX_LIMIT", "steps:6")
    with pytest.raises(SystemExit) as ended:
        fit(hvd.Distribute(record=tmp_path))
    assert ended.value.code == 0
    (run,) = read(tmp_path)
    assert (run.complete, run.ranks[0].end["reason"], run.ranks[0].steps["step"][-1]) == (True, "limit", 6)
    assert limits.from_environment().steps == 6
