"""The files around the software: what they call exists, and what they repeat is the same everywhere."""

import re
import tomllib

import pytest

from hvdx.version import __version__
from tests.launch import ROOT

yaml = pytest.importorskip("yaml")

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())


def commands(workflow):
    """Return the commands of a workflow."""
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def test_workflows_call_targets_of_the_makefile_alone():
    found = [command for workflow in WORKFLOWS for command in commands(workflow)]
    assert {"make check", "make test-all", "make wheel", "make docs"} <= set(found)
    for command in found:
        word, *targets = command.split()
        assert word == "make"
        assert set(targets) <= TARGETS


def test_commit_hooks_are_those_of_make_check():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (repo,) = config["repos"]
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]
    expected = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    assert repo["repo"] == "local"
    assert [hook["entry"] for hook in repo["hooks"]] == expected


def test_contributing_says_how_long_its_targets_take():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (`make .*?) \|.*\| ([^|]+) \|$", text, re.MULTILINE)
    named = {target for cell, time in rows if time.strip() for target in re.findall(r"`make ([\w-]+)`", cell)}
    assert {"venv", "check", "test", "test-quick", "fmt", "docs", "wheel", "mutants", "scripts", "matrix"} <= named
    for target in re.findall(r"`make ([\w-]+)", text):
        assert target in TARGETS


@pytest.mark.parametrize("form", ["bug", "idea"])
def test_forms_of_issues_have_questions(form):
    content = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{form}.yml").read_text())
    assert content["name"]
    assert content["description"]
    questions = [part for part in content["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in questions}) == len(questions)
    assert all(part["attributes"]["label"] for part in questions)


def test_version_and_license_are_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == __version__
    assert citation["license"] == project["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project["authors"]]
    released = f"## {__version__} ({citation['date-released']})"
    assert released in (ROOT / "CHANGELOG.md").read_text().splitlines()


def test_extras_that_pages_name_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"):
        for listed in re.findall(r"(?:hvdx|\.|\.whl)\[([\w,]+)\]'", page.read_text()):
            assert set(listed.split(",")) <= set(extras), page.name


def test_page_of_a_report_needs_what_its_extra_installs():
    """README's first screen installs it, and promises the page of `hvdx compare`."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "".join(path.read_text() for path in (ROOT / "hvdx" / "report").glob("*.py"))
    imported = set(re.findall(r"^ +(?:import|from) (\w+)", text, re.MULTILINE)) - {"hvdx"}
    installed = {re.match(r"[\w-]+", package)[0] for package in [*extras["report"], "numpy"]}
    assert {"matplotlib", "jinja2"} <= imported <= installed
