"""The faults of tests/mutants.toml apply to the code, and the runner reports their outcomes."""

import json
import os
import subprocess

import pytest

from tests import mutate
from tests.launch import ROOT

MUTANTS = mutate.load(mutate.FAULTS)
ROOMS = {
    *("kernels", "jobs/templates", "hvdx/codec", "hvdx/comm", "hvdx/strategies", "hvdx/strategies/serving"),
    *(
        "hvdx/strategies/threshold",
        "hvdx/strategies/threshold/routes",
        "hvdx/keras",
        "hvdx/keras/checkpoint",
        "hvdx/averaging",
        "hvdx/report",
        "hvdx/cli",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_fault_can_be_put_in_and_its_tests_are_there(mutant):
    assert mutate.problem(mutant, ROOT) == ""
    assert [mutate.missing_test(node, ROOT) for node in mutant.tests] == [""] * len(mutant.tests)
    assert mutant.tests
    assert mutant.ranks == 1 or all(node.startswith("tests/ranks/") for node in mutant.tests)
    # A change of several lines, or a long one, is more than one fault.
    assert mutant.old.strip("\n").count("\n") == mutant.new.strip("\n").count("\n") == 0


def test_every_room_has_faults():
    assert len(MUTANTS) >= 60
    assert {os.path.dirname(mutant.file) for mutant in MUTANTS} >= ROOMS
    assert sum(mutant.ranks > 1 for mutant in MUTANTS) >= 20
    assert sum(node.startswith("tests/test_") for mutant in MUTANTS for node in mutant.tests) >= 5


def entry(name, old, new, **more):
    lines = {"name": name, "file": "toy.py", "old": old, "new": new, "test": "test_toy.py::test_double"} | more
    return "\n".join(["[[mutant]]", *(f"{key} = {json.dumps(value)}" for key, value in lines.items())])


@pytest.fixture
def toy(tmp_path):
    """Make a git project of two files; return a function that runs faults on it."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "toy.py").write_text("def double(x):\n    y = x + x\n    assert y == x + x\n    return y\n")
    (tree / "test_toy.py").write_text(
        "import time\nfrom toy import double\n\ndef test_double():\n    assert double(2) == 4\n"
        "def test_slow():\n    time.sleep(60 * (double(1) == 3))\n"
    )
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tree, check=True, capture_output=True)
    # The copy has the current content of tracked files, committed or not.
    (tree / "toy.py").write_text((tree / "toy.py").read_text().replace("    assert y == x + x\n", ""))

    def run(faults, *words):
        file = tmp_path / "mutants.toml"
        file.write_text("\n".join(faults))
        return mutate.main([*words, "--json", str(tmp_path / "out.json")], tree, file)

    return run


def results(folder):
    return {told["name"]: told["result"] for told in json.loads((folder / "out.json").read_text())}


def test_faults_are_found_or_survive_or_do_not_apply(toy, tmp_path, capsys):
    faults = [
        entry("wrong", "x + x", "x + 1 + x"),
        entry("same", "x + x", "2 * x"),
        entry("gone", "x - x", "x"),
        entry("broken", "return y", "return y +"),
    ]
    assert toy(faults, "--jobs", "2") == 1
    assert results(tmp_path) == {"wrong": "found", "same": "SURVIVED", "gone": "ERROR", "broken": "ERROR"}
    said = capsys.readouterr().out
    assert "old text not found" in said
    assert "pytest ended with exit code" in said
    assert "SyntaxError" in said
    assert "4 faults: 1 found, 1 SURVIVED, 2 ERROR" in said
    assert (tmp_path / "tree" / "toy.py").read_text() == "def double(x):\n    y = x + x\n    return y\n"


def test_time_limit_counts_as_found_and_only_these_are_run(toy, tmp_path, capsys):
    faults = [entry("slow", "x + x", "x + x + 1", test="test_toy.py::test_slow"), entry("same", "x + x", "2 * x")]
    assert toy(faults, "--only", "slow", "--limit", "3", "--unchecked") == 0
    assert results(tmp_path) == {"slow": "hung"}
    assert "1 faults: 0 found, 1 hung" in capsys.readouterr().out


def test_tests_have_to_pass_without_faults_first(toy, tmp_path, capsys):
    assert toy([entry("any", "x + x", "x", test="test_toy.py::test_absent")]) == 1
    assert results(tmp_path) == {}
    assert "the tests have to pass without faults first: exit code 4" in capsys.readouterr().out


def test_interruption_leaves_nothing_behind(toy, tmp_path, capsys, monkeypatch):
    made = []
    monkeypatch.setattr(mutate.tempfile, "mkdtemp", lambda prefix: str(made[0]))
    made.append(tmp_path / "copies")
    made[0].mkdir()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(mutate.Run, "_report", interrupted)
    faults = [entry("slow", "x + x", "x + x + 1", test="test_toy.py::test_slow")]
    assert toy(faults, "--unchecked") == 130
    assert not made[0].exists()
    assert "nothing is left behind" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ([entry("twice", "a", "b"), entry("twice", "c", "d")], "each name once, got twice more often"),
        ([entry("odd", "a", "b", rank=2)], "odd: .*'rank'"),
        (['[[mutant]]\nname = "less"\nfile = "toy.py"\nold = "a"'], "less: .*'new'"),
    ],
)
def test_invalid_entries_are_refused(faults, told, tmp_path):
    file = tmp_path / "mutants.toml"
    file.write_text("\n".join(faults))
    with pytest.raises(ValueError, match=told):
        mutate.load(file)


def test_help_is_complete_and_unknown_names_are_refused(capsys):
    for words, told in (
        (["--help"], "a fault in tests/mutants.toml:"),
        (["--only", "no-such"], "no fault called no-such"),
    ):
        with pytest.raises(SystemExit):
            mutate.main(words)
        captured = capsys.readouterr()
        assert told in captured.out + captured.err


def test_list_names_file_and_test(capsys):
    assert mutate.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(MUTANTS)
    assert any(line.startswith("shard-update-is-applied-twice: hvdx/strategies/serving/shard.py: ") for line in lines)


def test_missing_test_knows_parameters():
    assert mutate.missing_test("tests/test_mutate.py::test_missing_test_knows_parameters[a::b-2]", ROOT) == ""
    assert mutate.missing_test("tests/test_mutate.py::test_of_nothing", ROOT) == (
        "there is no test_of_nothing in tests/test_mutate.py"
    )
    assert mutate.missing_test("tests/none.py::test", ROOT) == "there is no tests/none.py"
