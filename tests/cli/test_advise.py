"""`hvdx advise`: the measurements of a script, the answers, and the errors. No TensorFlow."""

# Tests: hvdx/cli/advising/answer.py, hvdx/cli/advising/machine.py, hvdx/cli/advising/script.py

import json
import re
import sys
import time
from pathlib import Path

import pytest

from hvdx.cli.advising import answer, machine, script
from hvdx.cli.main import main
from hvdx.costs.model import Situation
from hvdx.costs.types import Link, Machine
from tests.launch import ROOT

STAND_IN = [sys.executable, str(Path(__file__).with_name("stand_ins") / "recorded.py")]
TRAINING = script.Training(0.02, 0.0, 20, (1_860_000,), batch=64, slots=1.0)


@pytest.fixture
def advise(monkeypatch, tmp_path, capsys):
    """Return a function that runs the command on a machine of default speeds; it returns code, output and JSON."""
    monkeypatch.setattr(machine, "measure", lambda elements, copies: Machine())
    monkeypatch.setattr(machine, "job_size", lambda: 1)
    monkeypatch.setenv("HVDX_STRATEGY", "threshold")

    def call(*words):
        file = tmp_path / "advice.json"
        code = main(["advise", "--json", str(file), *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err, json.loads(file.read_text()) if file.exists() else {}

    return call


def test_advise_prefers_compression_on_a_slow_link(advise):
    code, text, _, document = advise("--bandwidth", "10mbit,1gbit", "-n", "2,4", *STAND_IN, "write", "20", "2000000")
    assert code == 0
    slow, fast = document["links"]
    assert [a["workers"] for a in slow["answers"]] == [2, 4]
    assert slow["answers"][0]["best"] == "threshold"
    assert document["training"]["seconds_a_step"] == pytest.approx(0.02)
    assert document["training"]["parameters"] == 2_000_000
    assert document["training"]["memory"] == 5e8
    assert [point["workers"] for point in fast["line"]] == [2**k for k in range(11)]
    for words in ("transfer", "2 workers at 10mbit", "4 workers at 1gbit", "HVDX_STRATEGY=", "hvdx run -n 4"):
        assert words in text
    assert (slow["chart_line"], fast["chart_line"]) == (5, 5)
    assert "* 5  computing takes more than 3 ms for each million parameters -> Threshold()" in text
    rows = {row["strategy"]: row for row in slow["answers"][1]["strategies"]}
    assert 5e8 < rows["all_reduce"]["peak"] < rows["threshold"]["peak"]
    assert rows["threshold"]["fits"]
    assert rows["all_reduce"]["terms"]["transfer"] > 100 * rows["threshold"]["terms"]["transfer"]


def test_advise_recommends_no_more_workers_than_an_epoch_has_batches(advise):
    """1,437 samples are 23 batches of 64: 1,024 workers would be fast on paper."""
    words = ["--bandwidth", "1gbit", *STAND_IN, "write", "100", "2000000", "23"]
    code, text, _, document = advise("-n", "4,1024", *words)
    assert code == 0
    assert [a["workers"] for a in document["links"][0]["answers"]] == [4]
    assert [point["workers"] for point in document["links"][0]["line"]] == [1, 2, 4]
    assert "An epoch of this script has 23 batches of 64 samples. With more than 5 workers," in " ".join(text.split())
    assert "hvdx run -n 4" in text
    # Numbers that nobody asked for leave a worker four batches.
    words[-1] = "15"
    assert [a["workers"] for a in advise(*words)[3]["links"][0]["answers"]] == [2]
    words[-1] = "23"
    code, _, said, _ = advise("-n", "1024", *words)
    assert code == 2
    assert "-n: expected at most 23 workers" in said


def test_answer_is_first_and_says_what_it_holds_for_if_the_batch_is_kept(advise):
    _, text, _, document = advise("--bandwidth", "10mbit", "-n", "4", *STAND_IN, "write", "20", "2000000")
    first = " ".join(text.partition("\n\n")[0].split())
    assert first.startswith("At 10mbit: threshold on 4 workers")
    assert first.endswith(" ".join(["hvdx run -n 4", *STAND_IN, "write 20 2000000"]))
    row = next(row for row in document["links"][0]["answers"][0]["strategies"] if row["strategy"] == "threshold")
    most = 0.02 / (row["seconds"] - 0.75 * row["terms"]["computing"])
    assert f"it takes at most {most:.2f} times" not in first
    assert f"the same strategy takes at most {most:.2f} times the samples per second" in first
    assert most < row["speedup"]


def test_advice_fits_a_terminal(advise):
    _, text, _, _ = advise("--bandwidth", "100mbit", "-n", "2,4", *STAND_IN, "write", "20", "2000000")
    assert max(len(line) for line in text.splitlines() if not line.startswith("Run: ")) <= 80


def test_advise_names_the_exchange_and_what_large_figures_rest_on(advise):
    words = ["--bandwidth", "100mbit", *STAND_IN, "write", "100", "20000000"]
    _, text, _, document = advise("-n", "2", *words)
    rows = document["links"][0]["answers"][0]["strategies"]
    assert next(row["note"] for row in rows if row["strategy"] == "threshold").count(", all-gather") == 1
    line = {point["workers"]: point for point in document["links"][0]["line"]}
    assert [line[n]["basis"] for n in (1, 4)] == ["emulated hosts"] * 2
    assert all((line[n]["basis"] == "simulation") == (line[n]["best"] == "threshold") for n in (8, 1024))
    assert "density" in line[4]["note"]
    assert "Figures for more come from formulas" in " ".join(text.split())
    rows = advise("-n", "1024,2048", *words)[3]["links"][0]["answers"]
    found = [{row["strategy"]: row["basis"] for row in answer["strategies"]} for answer in rows]
    assert [each["threshold"] for each in found] == ["simulation", "formulas"]
    assert {each["all_reduce"] for each in found} == {"formulas"}


def test_advise_declines_where_one_worker_is_as_fast(advise):
    code, text, _, document = advise("--bandwidth", "10mbit", "--latency", "200", *STAND_IN, "write", "0.5", "30000")
    assert code == 1
    assert "Do not distribute: one worker learns as fast." in text
    assert {a["best"] for a in document["links"][0]["answers"]} == {"one worker"}


def test_advise_says_which_link_it_assumes(advise):
    code, _, said, document = advise("-n", "2", *STAND_IN, "write", "20", "1000")
    assert code == 0
    assert "assuming a link of 1gbit" in said
    assert document["links"][0]["bandwidth"] == "1gbit"


def test_advise_measures_the_link_between_hosts(advise, monkeypatch):
    asked = []
    probed = machine.Probed(Link(2e-4, 5e6, 0.8), [("a", 0.01), ("b", 0.02)])
    monkeypatch.setattr(machine, "probe", lambda *arguments: asked.append(arguments) or probed)
    _, text, _, document = advise("--hosts", "a:2,b:2", *STAND_IN, "write", "20", "1000")
    assert asked == [(["a", "b"], 1000)]
    assert [a["workers"] for a in document["links"][0]["answers"]] == [4]
    assert document["links"][0]["bandwidth"] == "40mbit"
    assert "hvdx run --hosts a:2,b:2 -n 4" in text or "Do not distribute" in text
    said = re.search(r"b is 2.0 times slower than .* takes (\d+), (\d+) rows .* takes 0.67 of", " ".join(text.split()))
    assert int(said[1]) == pytest.approx(2 * int(said[2]), abs=2)


def test_advise_measures_copies_that_share_a_host(advise):
    _, text, said, document = advise(
        "--bandwidth", "1gbit", "-n", "4", "--workers-per-host", "2", *STAND_IN, "write", "20", "1000"
    )
    assert "2 copies at once" in said
    assert "with 2 workers on the host" in " ".join(text.split())
    assert document["training"]["seconds_a_step_shared"] == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["-n", "2"], "expected a command"),
        (["-n", "0", *STAND_IN, "fail"], "-n: expected numbers"),
        (["--bandwidth", "fast", *STAND_IN, "fail"], "advise: --bandwidth: expected a rate"),
        (["--latency", "-1", *STAND_IN, "fail"], "--latency"),
        (["--hosts", "a:2", *STAND_IN, "fail"], "two hosts"),
        (["--hosts", "a:x,b", *STAND_IN, "fail"], "'a:x'"),
        (["--workers-per-host", "-1", *STAND_IN, "fail"], "--workers-per-host"),
        (["--timeout", "0", *STAND_IN, "fail"], "--timeout"),
        ([*STAND_IN, "fail"], "exit code 1: ValueError: no data here"),
        ([*STAND_IN, "nothing"], "callbacks=[hvdx.keras.Distribute()]"),
        (["no-such-program"], "no-such-program: No such file"),
    ],
)
def test_advise_errors_name_the_cause(advise, words, named):
    code, out, said, _ = advise(*words)
    assert (code, out) == (2, "")
    assert named in said


def test_script_that_hangs_is_killed(advise):
    begin = time.monotonic()
    code, _, said, _ = advise("--timeout", "0.5", *STAND_IN, "hang")
    assert (code, time.monotonic() - begin < 20) == (2, True)
    assert "within 0 s" in said or "within 1 s" in said


def test_copies_are_single_workers_with_a_share_of_the_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    arguments = {"PATH": "/bin", "OMPI_COMM_WORLD_RANK": "1", "HVDX_STRATEGY": "auto", "HVDX_SEED": "3"}
    made = script.environment(Path("there"), 2, arguments)
    assert made == {
        "PATH": "/bin",
        "HVDX_SEED": "3",
        "HVDX_RECORD": "there",
        "HVDX_LIMIT": "steps:24",
        "OMP_NUM_THREADS": "4",
        "TF_NUM_INTRAOP_THREADS": "4",
        "TF_NUM_INTEROP_THREADS": "4",
    }


def test_answers_are_sorted_and_the_split_layers_have_no_strategy():
    link = Link(1e-4, 1.25e6)
    found = answer.answer(answer.situation_of(TRAINING, Machine(), link, 4, 1), "10mbit")
    samples = [p.samples for p in found.predictions.values()]
    assert samples == sorted(samples, reverse=True)
    assert answer.SPLIT not in found.predictions
    assert answer.answer(answer.situation_of(TRAINING, Machine(), link, 1, 1), "10mbit").best == answer.ALONE
    assert {"all_reduce", "threshold", "parameter_averaging", "parameter_server:servers=colocated"} <= set(
        found.predictions
    )


def test_starved_threshold_is_no_reason_to_distribute():
    """Large tables at 10 Mbit/s: steps would be fast, but the workers would hardly learn from each other."""
    tables = script.Training(1e-3, 0.0, 20, (26_122_000,), batch=64, slots=1.0)
    found = answer.answer(answer.situation_of(tables, Machine(), Link(1e-4, 1.2e6), 4, 1), "10mbit")
    assert found.speedup("threshold") > 1.1
    assert found.predictions["threshold"].starved
    assert found.best == answer.ALONE
    assert "Do not distribute" in answer.advice([found], "python train.py")


def test_strategies_that_do_not_fit_into_memory_are_left_out():
    """0.4 GB of weights: a worker takes 3 GB alone, and `threshold` two arrays more."""
    large = script.Training(3.0, 0.0, 20, (1_000_000,) * 100, batch=16, slots=1.0)
    made = answer.situation_of(large, Machine(), Link(1e-4, 1.2e8), 4, 1)
    assert answer.answer(made, "1gbit").best == "threshold"
    found = answer.answer(made, "1gbit", memory=answer.Memory(3e9, 3.5e9))
    assert found.peak("threshold") == pytest.approx(3.8e9, rel=0.02)
    assert (found.fits("threshold"), found.fits("all_reduce")) == (False, True)
    assert found.best == "parameter_averaging"
    said = " ".join(answer.advice([found], "python train.py").split())
    assert "Left out, since a host has 3.5 GB of memory for each of its workers: threshold takes 3.83 GB" in said
    none = answer.answer(made, "1gbit", memory=answer.Memory(3e9, 2e9))
    assert (none.best, none.fastest_able) == (answer.ALONE, answer.ALONE)
    assert answer.advice([none], "python train.py").startswith("Do not distribute. Left out, since a host has 2 GB")


# --- the chart


def situation(seconds=0.1, elements=1_000_000, rate=1e9, slots=0.0):
    return Situation(4, (elements,), seconds, Link(1e-4, rate / 8), slots=slots)


@pytest.mark.parametrize(
    ("case", "line"),
    [
        (situation(rate=1e10), 3),
        (situation(rate=1.5e9), 4),
        (situation(rate=1e8), 5),
        (situation(rate=1e8, seconds=0.002), 7),
        (situation(rate=3e8, seconds=0.002), 6),
        (situation(rate=3e8, seconds=0.002, slots=2.0), 7),
    ],
)
def test_line_of_the_chart(case, line):
    assert answer.chart_line(case) == line
    marked = [text for text in answer.chart_text(case).splitlines() if text.startswith("*")]
    assert [text.split()[1] for text in marked] == [str(line)]


def test_chart_is_that_of_the_page():
    page = (ROOT / "docs" / "scaling.md").read_text().split("## Which strategy for me")[1]
    rows = re.findall(r"^\| (\d) \| (.*) \| (.*) \|$", page, re.MULTILINE)
    plain = [(if_, re.sub(r"\[(.*?)\]\(.*?\)", r"\1", then).replace("`", "")) for _, if_, then in rows]
    assert [number for number, *_ in rows] == [str(i) for i in range(1, len(answer.CHART) + 1)]
    assert plain == list(answer.CHART)
