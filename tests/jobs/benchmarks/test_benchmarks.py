"""Each benchmark runs at a tiny size. Workers run on this machine, without emulated links."""

# Tests: jobs/benchmarks/accuracy.py, jobs/benchmarks/balance.py, jobs/benchmarks/batches.py
# Tests: jobs/benchmarks/checkpoint.py
# Tests: jobs/benchmarks/defaults.py, jobs/benchmarks/dense.py
# Tests: jobs/benchmarks/density.py, jobs/benchmarks/edges.py
# Tests: jobs/benchmarks/gpu.py, jobs/benchmarks/memory.py
# Tests: jobs/benchmarks/local_steps.py, jobs/benchmarks/lost_host.py
# Tests: jobs/benchmarks/peers.py, jobs/benchmarks/predict.py
# Tests: jobs/benchmarks/record_update.py, jobs/benchmarks/scaling.py
# Tests: jobs/benchmarks/servers.py, jobs/benchmarks/simulate.py, jobs/benchmarks/split.py
# Tests: jobs/benchmarks/split_memory.py, jobs/benchmarks/survival.py

import importlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvdx.jobs.benchmarks import defaults, gpu, harness, lost_host, record_update, wire
from tests.launch import ROOT, run

_SECONDS = 120
_PAIR = ["--split", "2", "--layers", "pair", "--data", "digits", "--width", "16", "--channels", "4"]
#: By benchmark: options, and attributes of its module in place of longer lists of cases.
BENCHMARKS = {
    "accuracy": ("--models lm --strategies 1e-2 --seeds 1 --steps 2 --workers 2 --batch 2", {}),
    "balance": ("--times 1,2 --jitter 0.1 --ways threshold --batch 4 --steps 9 --data digits", {"_SETTLED": 2}),
    "batches": ("--rounds 1 --steps 5", {}),
    "checkpoint": ("--parameters 1000 --repeat 1", {}),
    "defaults": (
        "--cases small --strategies tau=0.001 --rates 1",
        {"CASES": {"small": defaults.Case("recommender", "lamb", 0.004, 2, 4, 3, "choose")}},
    ),
    "dense": ("--hosts 2 --ways MPI,mpi --wires bf16 --steps 2 --hidden 4", {}),
    "density": ("--hosts 2 --bandwidth 1gbit --burst 5kB --steps 40 --hidden 4 --batch 8", {}),
    "edges": ("--strategies all_reduce", {"VICTIMS": (0,), "PLACES": ("the last line",)}),
    "memory": ("--megabytes 1", {"STRATEGIES": {"AllReduce": ("all_reduce", "sgd")}}),
    "scaling": ("--models lm --hosts 1,2 --strategies threshold --seeds 1 --most-steps 20 --rates 0.01", {}),
    "local_steps": (
        "--workers 2 --steps 4 --batch 2 --rates 0.002",
        {"SCHEMES": {"all-reduce": "all_reduce:engine=mpi", "SparseLoCo": "sparse_loco"}, "PERIOD": 2},
    ),
    "peers": ("--quick --backends torch", {}),
    "predict": ("--again --models mlp --hosts 2 --bandwidth 1gbit", {}),
    "servers": ("--workers 2 --servers 1 --steps 4 --hidden 4", {}),
    "simulate": ("--hosts 2 --bandwidth 1gbit --elements 2k --steps 4", {}),
    "split": ("--ways pair --steps 4 --batch 4", {"WAYS": {"pair": _PAIR}}),
    "split_memory": ("--ranks 2 --width 16 --steps 1", {}),
    "survival": ("--rounds 1 --steps 44", {"STRATEGIES": ("all_reduce:engine=mpi",), "COST": 100.0}),
}


@pytest.fixture
def on_this_machine(tmp_path, monkeypatch):
    """Replace `harness.launch` by a function that starts the workers without emulated hosts, on little data."""

    def launch(file, setting, ranks=1, bandwidth="", burst="", per_host=1, limit=0.0, env=None, start=()):
        folder = tmp_path / "workers"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        setting = {"data": "digits"} | setting | {"folder": str(folder)}
        fresh = "KERAS_BACKEND" in (env or {})
        done = run(ranks, [file, "--worker", json.dumps(setting)], _SECONDS, env, fresh)
        assert done.code == 0, done
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        link = {"sent": 1, "received": 1}
        return harness.Ended(found, done.out, {"seconds": 1.0, "links": [link] * ranks})

    monkeypatch.setattr(harness, "launch", launch)


@pytest.mark.long
@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_writes_figures_and_prints_a_table(name, on_this_machine, tmp_path, monkeypatch, capsys):
    words, attributes = BENCHMARKS[name]
    benchmark, file = importlib.import_module(f"hvdx.jobs.benchmarks.{name}"), tmp_path / "figures.json"
    for attribute, value in attributes.items():
        monkeypatch.setattr(benchmark, attribute, value)
    if name in ("accuracy", "defaults"):
        monkeypatch.setattr(benchmark, "ProcessPoolExecutor", lambda workers, *_, **more: ThreadPoolExecutor(workers))
    if name == "peers":
        pytest.importorskip("torch")
    if name == "predict":
        facts = json.loads((ROOT / "docs" / "benchmarks" / "predict.json").read_text())
        measured = {f"mlp 2 1gbit {strategy}": {"measured": {"step": 0.1}} for strategy in ("all_reduce", "threshold")}
        file.write_text(json.dumps(facts | {"cases": measured}))
    assert benchmark.main([*words.split(), "--json", str(file)]) == 0
    assert json.loads(file.read_text())
    assert len(capsys.readouterr().out.splitlines()) >= 3


def test_recorded_updates_are_measured(tmp_path):
    file = str(tmp_path / "update.npz")
    small = ["--data", "digits", "--hidden", "4", "--batch", "8", "--step", "2", "--densities", "0.1"]
    assert record_update.main([*small, "--output", file]) == 0
    assert [row["step"] for row in wire.measure_recorded(file)["all"]] == [2]


def test_benchmark_of_a_lost_host_says_what_it_takes(capsys, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1)
    assert lost_host.main([]) == 1
    assert "expected root, and sshd" in capsys.readouterr().err


def test_benchmark_of_a_gpu_says_that_there_is_none(capsys):
    if gpu.main([]):
        assert "expected a GPU" in capsys.readouterr().err
