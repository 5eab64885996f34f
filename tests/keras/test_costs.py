"""`hvdx.keras.summary`: bytes and memory of each layer, split and whole."""

import re

import keras
import pytest

import hvdx
from hvdx.errors import ConfigError
from hvdx.keras.costs import layer_costs, setting_of, slots_per_weight
from hvdx.keras.layers import SplitDense


def costs(layers, shape=(6,), optimizer=None, **setting):
    model = keras.Sequential([keras.Input(shape), *layers])
    if optimizer is not None:
        model.compile(optimizer, "mse")
    setting = {"batch": 5, "split": 2, "ranks": 2} | setting
    return layer_costs(model, setting_of(model, **setting))


def test_single_layer_sends_inputs_and_outputs_both_ways():
    below, single = costs([keras.layers.Dense(8), SplitDense(10)])
    # A rank sends its 5 rows of 8 inputs, and receives 5 outputs for each of the other's rows; backward the same.
    assert single.split.sent == 4 * 2 * (5 * 8 + 5 * 5)
    # All-reduce among two ranks sends the weights once.
    assert single.whole.sent == 4 * (8 * 10 + 10)
    assert single.is_split
    assert not below.is_split
    # The first layer's input needs no gradient.
    assert below.split.sent == 4 * (5 * 6 + 2 * 5 * 4)
    assert below.present == below.whole


def test_pair_sends_only_its_inputs_and_outputs():
    pair = [SplitDense(8, gather_output=False), SplitDense(10, input_is_split=True)]
    _, first, second = costs([keras.layers.Dense(6), *pair], split=4, ranks=4)
    assert first.split.sent == 4 * 2 * 3 * 5 * 6
    # The bias after the sum belongs to all ranks.
    assert second.split.sent == 4 * 2 * 3 * 5 * 10 + 4 * 10 * 2 * 3 / 4
    assert second.split.held == 4 * (8 * 10 / 4 + 10)


def test_parts_are_reduced_among_peers():
    _, alone = costs([keras.layers.Dense(8), SplitDense(10)], split=2, ranks=2)
    _, peers = costs([keras.layers.Dense(8), SplitDense(10)], split=2, ranks=8)
    assert peers.split.sent - alone.split.sent == 4 * (8 * 10 + 10) / 2 * 2 * 3 / 4


def test_rows_of_sequences_count():
    (short,) = costs([SplitDense(4)])
    (long,) = costs([SplitDense(4)], shape=(3, 6))
    assert long.split.sent == 3 * short.split.sent


def test_half_precision_halves_activations_and_leaves_gradients():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        (half,) = costs([SplitDense(4)], ranks=4)
    finally:
        keras.config.set_dtype_policy("float32")
    (whole,) = costs([SplitDense(4)], ranks=4)
    assert whole.split.sent - half.split.sent == 2 * (5 * 6 + 2 * 5 * 2)
    assert whole.whole.sent == half.whole.sent


def test_table_sends_its_vectors():
    (table,) = costs([keras.layers.Embedding(100, 6)], shape=(3,))
    # Half of the 15 ids are the other rank's: an id goes out; a vector of the other's ids, and a gradient.
    assert table.split.sent == 15 / 2 * (16 + 2 * 4 * 6)
    assert table.whole.sent == 15 * (4 * 6 + 4)
    assert table.split.held == 4 * 100 * 6 / 2


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (keras.optimizers.SGD(), 0),
        (keras.optimizers.SGD(momentum=0.9), 1),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), 2),
        (keras.optimizers.AdamW(use_ema=True), 3),
    ],
    ids=["sgd", "momentum", "adam", "ema"],
)
def test_state_of_the_optimizer_is_counted(optimizer, expected):
    assert slots_per_weight(optimizer) == expected


def test_frozen_layers_send_nothing_and_have_no_momenta():
    frozen = keras.layers.Dense(8, trainable=False)
    first, second = costs([frozen, SplitDense(10)], optimizer=keras.optimizers.SGD(momentum=0.9))
    assert first.whole == (0, 4 * 7 * 8)
    assert second.split.sent == 4 * (5 * 8 + 2 * 5 * 5)
    assert second.split.held == 4 * 9 * 10 / 2 * 2


def test_summary_shows_the_layers_of_nested_models(capsys):
    inner = keras.Sequential([keras.Input((6,)), SplitDense(4000, name="wide")])
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6, name="small"), inner])
    hvdx.keras.summary(model, split=2, ranks=4)
    printed = capsys.readouterr().out
    assert re.search(r"^small +42 +whole", printed, re.MULTILINE)
    assert re.search(r"^wide +28 k +split", printed, re.MULTILINE)
    texts = []
    hvdx.keras.summary(model, split=2, ranks=4, print_fn=texts.append)
    assert "".join(texts) == printed.rstrip("\n")


def test_numbers_that_do_not_fit_are_refused():
    model = keras.Sequential([keras.Input((6,)), SplitDense(4)])
    for wrong, said in (
        ({"split": 3, "ranks": 4}, "a divisor of 4"),
        ({"split": 0}, "split: expected a positive number, got 0"),
        ({"batch": 1.5}, "batch: expected"),
    ):
        with pytest.raises(ConfigError, match=said):
            hvdx.keras.summary(model, **wrong)
    with pytest.raises(ConfigError, match="has no weights yet"):
        hvdx.keras.summary(keras.Sequential([SplitDense(4)]))
