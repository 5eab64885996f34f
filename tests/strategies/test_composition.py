"""Exchanges are composed: nobody changes another object, and no part inherits from another of its kind."""

# Tests: hvdx/strategies/step.py

import ast
from pathlib import Path

import numpy as np
import pytest

import hvdx.strategies.parameter_server
import hvdx.strategies.threshold.hosts
import hvdx.strategies.threshold.ordered
import hvdx.strategies.threshold.routes
from hvdx.strategies import Encoder, Exchange, Route
from hvdx.strategies.step import Arrived
from tests.strategies.threshold.test_strategy import flat, steps_of, update
from tests.strategies.virtual import on_all

STRATEGIES = Path(hvdx.strategies.__file__).parent
ROOM_OF_KERAS = STRATEGIES.parent / "keras"
# Modules in which nobody assigns attributes of another object. Those of the servers are not among them yet.
CLEAN = [
    *STRATEGIES.glob("threshold/**/*.py"),
    *STRATEGIES.glob("serving/*exchange.py"),
    *STRATEGIES.glob("serving/*sessions.py"),
    *(STRATEGIES / f"{m}.py" for m in ("host_exchange", "step", "split", "sessions")),
    # The seams replace attributes of objects of Keras; that is their task.
    *sorted(path for path in ROOM_OF_KERAS.rglob("*.py") if path.parent.name != "seams"),
]
# Counters are added to wherever something is counted; the flag of an array is its own.
COUNTERS = {"counts", "telemetry", "self.telemetry", "self._zeros.flags"}
# Copies that a class makes of itself.
COPIES = {("strategy", "other")}
# Names of objects of Keras and TensorFlow in the room that adapts them; some mean these in one module only.
FOREIGN = {
    *("model", "self.model", "optimizer", "variable", "iterator", "self._iterator", "options", "graph", "keras"),
    *(("optimizer", "part"), ("distributed_optimizer", "part"), ("distributed_optimizer", "inner")),
    *(("callback_list", "callbacks"), ("callback_list", "callback"), ("callback_list", "bar")),
    *(("callback_list", "logger"), ("py_datasets", "adapter")),
    *(("generators", "state"), ("shares", "share"), ("data", "made"), ("autograph", "config"), ("loss", "losses")),
    *(("train_step", "train_step"), ("whole", "split"), ("whole", "owner")),
}


def owners(tree):
    """Yield (owner, line) of each attribute that is assigned or deleted, except those of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            owner = ast.unparse(node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            owner = ast.unparse(node.args[0])
        else:
            continue
        if owner not in ("self", "cls"):
            yield owner, node.lineno


def is_foreign(path, owner):
    """Return whether an owner is an object of Keras or TensorFlow."""
    names = {owner, owner.split(".")[0], (path.stem, owner)}
    return ROOM_OF_KERAS in path.parents and not FOREIGN.isdisjoint(names)


@pytest.mark.parametrize("path", CLEAN, ids=lambda path: path.stem)
def test_nobody_assigns_attributes_of_another_object(path):
    found = [(o, line) for o, line in owners(ast.parse(path.read_text())) if not is_foreign(path, o)]
    assert [f"{path}:{line}: {o}" for o, line in found if o not in COUNTERS and (path.stem, o) not in COPIES] == []


def test_assignments_are_found():
    code = "a.b = 1\nself.inner.times = 2\nfor x.y in z: pass\nsetattr(e, 'f', 3)\ng.h += 1\ndel i.j\nself.k = 4"
    assert sorted(line for _, line in owners(ast.parse(code))) == [1, 2, 3, 4, 5, 6]


def test_route_of_another_package_gives_the_sum_and_skips_steps(monkeypatch):
    """The route of docs/extending.md."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "fixtures" / "extension")
    from hvdx_example.route import TotalThreshold

    run = steps_of(TotalThreshold(target_density=0.05), 12, finite=lambda rank, step: (rank, step) != (1, 3))
    everyone = on_all(3, run)
    for got, exchange in everyone:
        assert exchange.telemetry.skipped == 1
        assert [step.tobytes() for step in got] == [step.tobytes() for step in everyone[0][0]]
    applied = 3 * np.sum(everyone[0][0], axis=0, dtype=np.float64)
    residuals = np.sum([flat(exchange.residuals) for _, exchange in everyone], axis=0, dtype=np.float64)
    wanted = np.sum([flat(update(r, t)) for r in range(3) for t in range(12) if t != 3], axis=0, dtype=np.float64)
    np.testing.assert_allclose(applied + residuals, wanted, atol=2e-6)


def classes_below(base):
    """Return {class: number of classes of hvdx from `base` down to it}; jobs extend hvdx, as users do."""
    found, depth, level = {}, 0, [base]
    while level := [c for one in level for c in one.__subclasses__() if is_part(c.__module__)]:
        depth += 1
        found |= dict.fromkeys(level, depth)
    return found


def is_part(module):
    return module.startswith("hvdx.") and not module.startswith("hvdx.jobs.")


@pytest.mark.parametrize("base", [Encoder, Route, Arrived])
def test_no_part_inherits_from_another_of_its_kind(base):
    assert set(classes_below(base).values()) == {1}


def test_exchanges_are_at_most_two_levels_below_the_contract():
    found = classes_below(Exchange)
    assert len(found) > 8
    assert [c.__name__ for c, depth in found.items() if depth > 2] == []
