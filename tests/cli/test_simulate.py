"""`hvdx simulate`: its tables, its JSON, and its errors."""

import json

import pytest

from hvdx.cli.main import main


def simulate(capsys, *words):
    code = main(["simulate", "--core-speed", "inf", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_simulate_prints_a_table_and_writes_json(capsys, tmp_path):
    file = tmp_path / "figures.json"
    words = ["--workers", "2,4", "--bandwidth", "10mbit,1gbit", "--steps", "12", "--hidden", "32", "--json", str(file)]
    strategies = "all_reduce:engine=mpi;threshold:target_density=0.05;parameter_averaging:period=4,engine=mpi"
    code, text, said = simulate(capsys, *words, "--strategies", strategies)[:3]
    assert code == 0
    assert "12 of 12: 4 workers at 1gbit, parameter_averaging" in said
    assert "model: a network on scikit-learn's digits, not yours: 2,410 parameters," in text
    assert "1,437 samples, batches of 32 a worker, 0.02 s of computing a step" in text
    assert "less than a batch" not in text
    assert max(map(len, text.splitlines())) <= 80
    for part in ("4 workers at 10mbit, 12 steps", "ms a step", "network", "sent", "memory", "loss 0.", "at end"):
        assert part in text
    cases = json.loads(file.read_text())["cases"]
    assert len(cases) == 12
    found = {(c["workers"], c["bandwidth"], c["strategy"].partition(":")[0]): c for c in cases}
    assert found[4, "10mbit", "all_reduce"]["seconds"] > 1.3 * found[4, "10mbit", "threshold"]["seconds"]
    assert found[4, "10mbit", "all_reduce"]["sent"] > 5 * found[4, "10mbit", "threshold"]["sent"]
    assert found[4, "1gbit", "all_reduce"]["losses"][-1][1] < found[4, "1gbit", "all_reduce"]["losses"][0][1]


def test_simulate_says_which_workers_have_less_than_a_batch_and_ends_in_time(capsys, tmp_path, monkeypatch):
    file = tmp_path / "figures.json"
    words = ["--workers", "2,128", "--steps", "2000", "--hidden", "16", "--limit", "0.2", "--json", str(file)]
    code, text, _ = simulate(capsys, *words, "--strategies", "all_reduce:engine=mpi;threshold:target_density=0.05")
    assert code == 0
    assert "\n128 workers: an epoch has less than a batch for each" in text
    assert all(case["taken"] < 2000 for case in json.loads(file.read_text())["cases"])
    # Without --limit, all cases share the time.
    monkeypatch.setattr("hvdx.cli.simulate._ALL_SECONDS", 0.4)
    words[words.index("--limit") :] = ["--json", str(file)]
    assert simulate(capsys, *words, "--strategies", "threshold:target_density=0.05")[0] == 0
    assert all(case["taken"] < 2000 for case in json.loads(file.read_text())["cases"])


def test_simulate_of_made_updates_prints_no_losses(capsys):
    words = ["--elements", "50000", "--workers", "16", "--workers-per-host", "4", "--steps", "8", "--json", "-"]
    spellings = "threshold:target_density=0.01,local=none;threshold:target_density=0.01"
    code, text, _ = simulate(capsys, *words, "--strategies", spellings)
    case, summed = json.loads(text)["cases"]
    assert (code, case["running"], case["losses"]) == (0, 4, [])
    assert case["crossing"] == pytest.approx(case["sent"] * 12 / 15)
    # Ranks that add up their updates, in shared memory, send little.
    assert summed["crossing"] < summed["sent"] < 0.2 * case["crossing"]
    code, text, _ = simulate(capsys, *words[:-2], "--strategies", "threshold:target_density=0.01")
    assert "16 workers on 4 hosts at 1gbit, 8 steps; 4 run, the others repeat them" in text
    assert "loss" not in text


def test_simulate_prints_the_rows_of_few_workers(capsys):
    words = ["--elements", "100", "--workers", "2,16", "--steps", "12", "--slow", "1:3", "--balance"]
    _, text, _ = simulate(capsys, *words, "--strategies", "all_reduce:engine=mpi")
    assert text.count("rows of a step in the end") == 1
    assert "\nall_reduce:engine=mpi: rows of a step in the end: 48, 16\n" in text


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--workers", "0"], "--workers 4,16"),
        (["--workers", "four"], "--workers 4,16"),
        (["--workers-per-host", "0"], "leave it out"),
        (["--bandwidth", "fast"], "--bandwidth 100mbit"),
        (["--bandwidth", ","], "leave them out"),
        (["--latency", "2"], "--latency 1ms"),
        (["--computing", "2h"], "--computing 1ms"),
        (["--strategies", "threshhold"], "threshold"),
        (["--strategies", "threshold:threads=3"], "Leave it out"),
        (["--strategies", "parameter_server"], "hvdx compare"),
        (["--slow", "64:2"], "--slow 1:10"),
        (["--slow", "1:0"], "--slow 1:10"),
        (["--jitter", "-1"], "--jitter 0.2"),
        (["--core-speed", "0"], "leave it out"),
        (["--steps", "0"], "leave it out"),
        (["--elements", "0"], "leave it out"),
    ],
)
def test_simulate_refuses_bad_options(capsys, words, remedy):
    code, text, said = simulate(capsys, *words)
    assert (code, text) == (2, "")
    assert remedy in said
    assert said.startswith("hvdx: ")
    assert len(said.splitlines()) == 1


def test_simulate_names_a_file_that_cannot_be_written(capsys, tmp_path):
    words = ["--elements", "100", "--workers", "2", "--steps", "1", "--strategies", "all_reduce:engine=mpi"]
    code, _, said = simulate(capsys, *words, "--json", str(tmp_path / "missing" / "file"))
    assert code == 2
    assert "name a file in a folder that exists" in said
