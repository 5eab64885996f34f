"""The runner of tests/scripts judges runs."""

import json

import numpy as np
import pytest

from tests import try_scripts
from tests.launch import Run
from tests.try_scripts import FOLDER, Cell, Script, ScriptError, attempt, judge, merge, read, write_page

# A script whose ranks end with different weights, and say nothing.
WRONG = '''"""Weights that change on one rank after the fit."""

import keras
import numpy as np

import hvdx

hvdx.init()
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
model.fit(hvdx.shard((x, x[:, :1]), 8), epochs=2, verbose=0, callbacks=[hvdx.keras.Distribute()])
if hvdx.rank() == 1:
    model.layers[0].kernel.assign_add([[0.0], [1e-6], [0.0]])
'''
REFUSAL = {"module": "hvdx.errors", "name": "ConfigError", "text": "x: expected 1, got 2. Use 1."}


def seen(weight=1.0, ranks=2, losses=(2.0, 1.0), errors=(), other=None):
    weights = [{"0 model: kernel": np.array([weight, 2.0])} for _ in range(ranks)]
    histories = [[{"loss": list(losses)}] for _ in range(ranks)]
    if other is not None:
        weights[-1]["0 model: kernel"][0] = other
    return try_scripts._Seen(list(errors), histories, weights)


def verdict(here, strategy="all_reduce:engine=mpi", code=0, out="", **lines):
    return judge(Script(FOLDER / "x.py", "x", **lines), strategy, Run(code, out), here, seen(ranks=1), 2)


@pytest.mark.long
def test_honest_script_equals_one_process():
    cells = attempt(read(FOLDER / "mlp.py"), ["all_reduce:engine=mpi"])
    assert [cell.verdict for cell in cells] == ["trains", "equal"], cells


def test_script_whose_ranks_silently_differ_fails(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    _, cell = attempt(read(tmp_path / "wrong.py"), ["all_reduce:engine=mpi"])
    assert cell.verdict == "FAILS"
    assert "kernel differs between rank 0 and rank 1" in cell.detail


def test_verdicts():
    assert verdict(seen()) == ("equal", "0e+00")
    assert verdict(seen(losses=(2.0, 1.5)), "threshold") == ("trains", "1.50")
    assert verdict(seen(1.1), alone="other noise") == ("trains", "1.00")
    assert verdict(seen(other=7.0), own=("kernel",), alone="a queue") == ("trains", "1.00")
    assert verdict(seen(errors=[REFUSAL]), code=1, refused=("all_reduce",)) == ("refused", REFUSAL["text"])


@pytest.mark.parametrize(
    ("here", "more", "said"),
    [
        (seen(1.1), {}, "kernel differs from one process"),
        (seen(losses=(2.0, 1.1)), {}, "loss of fit 1 differs from one process"),
        (seen(other=7.0), {}, "kernel differs between rank 0 and rank 1"),
        (seen(np.nan), {}, "not finite"),
        (seen(losses=(1.0, 2.0)), {}, "does not fall"),
        (seen(losses=(1.0, np.nan)), {"strategy": "threshold"}, "not finite"),
        (seen(ranks=1), {}, "1 of 2 ranks"),
        (seen(), {"code": None}, "time limit"),
        (seen(), {"code": 1, "out": "ValueError: no"}, "exit status 1: ValueError: no"),
        (seen(errors=[REFUSAL]), {"code": 1}, "does not announce"),
        (seen(errors=[REFUSAL | {"name": "ReplicaError"}]), {"code": 1, "refused": ("all_reduce",)}, "ReplicaError: x"),
        (seen(errors=[REFUSAL | {"module": "builtins"}]), {"code": 1, "refused": ("all_reduce",)}, "ConfigError: x"),
        (seen(), {"refused": ("all_reduce",)}, "although the script announces"),
        (seen(), {"out": "a\nhvdx: WARNING: 2 ranks each train a model of their own"}, "each train a model"),
    ],
)
def test_failures(here, more, said):
    with pytest.raises(ScriptError, match=said):
        verdict(here, **more)


def test_histories_that_differ_between_ranks_fail():
    here = seen()
    here.histories[1][0]["loss"] = [2.0, 1.1]
    with pytest.raises(ScriptError, match="loss of fit 1"):
        verdict(here, "threshold")


def test_every_script_has_a_docstring_of_known_lines(tmp_path):
    for path in sorted(FOLDER.glob("*.py")):
        script = read(path)
        assert script.title.endswith("."), path
        for strategy in script.refused:
            of_backend = (f"{backend} {s}" for backend, some in try_scripts.STRATEGIES.items() for s in some)
            known = (*try_scripts.STRATEGIES["tensorflow"], *of_backend)
            assert any(name.startswith(strategy) for name in known), f"{path}: {strategy}"
        assert set(script.backends) <= set(try_scripts.STRATEGIES), path
    (tmp_path / "typing_error.py").write_text('"""Title.\n\nRefuse: all_reduce\n"""')
    with pytest.raises(ValueError, match="Refuse"):
        read(tmp_path / "typing_error.py")


def test_results_of_a_part_replace_their_cells_alone(tmp_path):
    path, page = tmp_path / "results.json", tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- results -->\nearlier results\n<!-- end of results -->\n\nEnd\n")
    merge(
        path,
        [
            *(Cell("tensorflow", "mlp", s, "trains") for s in ("threshold", "auto")),
            Cell("jax", "mlp", "threshold", "FAILS", "hangs"),
            Cell("tensorflow", "gone", "auto", "trains"),
        ],
    )
    kept = merge(path, [Cell("jax", "mlp", "threshold", "refused", "x: expected 1, got 2.")])
    assert [(c.backend, c.script, c.strategy, c.verdict) for c in kept] == [
        ("tensorflow", "mlp", "threshold", "trains"),
        ("tensorflow", "mlp", "auto", "trains"),
        ("jax", "mlp", "threshold", "refused"),
    ]
    assert len(json.loads(path.read_text())) == 3
    write_page(page, kept)
    text = page.read_text()
    assert "earlier results" not in text
    assert text.startswith("# Page\n")
    assert text.endswith("\n\nEnd\n")
    assert "`mlp`, JAX, refused under threshold: x: expected 1, got 2." in text
