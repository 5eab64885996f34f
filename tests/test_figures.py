"""The figures of the pages are those of the JSON files in `docs/benchmarks`.

docs/tables.py makes the tables. A table of figures without its marks is an error, unless `EXEMPT` has a reason.
"""

import doctest
import importlib.util
import re
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any

import pytest

from tests.launch import ROOT

DOCS = ROOT / "docs"
#: Tables of figures that no file has, by page and headers, and why.
EXEMPT = {
    ("containers.md", "part | seconds | processor time, seconds"): "`make container` prints them",
    ("decentralised.md", "strategy | ms a step | loss after 0.65 s | after 200 steps"): (
        "the command below the table makes it in seconds, on virtual clocks; ADR 43 has it"
    ),
    (
        "decentralised.md",
        "learning rate | all-reduce | `Threshold()`, one host | `Threshold()`, 100 Mbit/s",
    ): "its commands stand below it, a minute each",
    (
        "decentralised.md",
        "strategy | bytes of all-reduce | test accuracy, %",
    ): "its command stands above it, and takes three minutes",
    ("scaling.md", "training | parameters | samples a step and worker | target"): "describes the trainings",
}
#: Pages whose tables have no measured figures.
FORMATS = {"wire-format.md": "tests/codec/test_wire_document.py compares them with the codec"}


@pytest.fixture(scope="module")
def tables() -> Any:
    """Return the module docs/tables.py."""
    spec = importlib.util.spec_from_file_location("tables", DOCS / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Return the text of each page of docs without its blocks of code; without the decision records."""
    names = [path for path in sorted(DOCS.rglob("*.md")) if "adr" not in path.parts]
    block = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    return {str(path.relative_to(DOCS)): block.sub("", path.read_text()) for path in names}


def found(text: str) -> Iterable[tuple[str, list[str], list[list[str]]]]:
    """Yield the tables of a page: text of the section around it, headers, cells of each line."""
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        for block in re.findall(r"(?:^\|.*\n)+", section + "\n", re.MULTILINE):
            cells = [[cell.strip() for cell in re.split(r" ?\| ", line[1:-1] + " ")] for line in block.splitlines()]
            yield section, cells[0], cells[2:]


def has_figures(lines: Sequence[Sequence[str]]) -> bool:
    """Return whether most cells beyond the first column begin with a number."""
    cells = [cell.strip("*`") for line in lines for cell in line[1:] if cell]
    return sum(re.match(r"[+-]?\d", cell) is not None for cell in cells) > len(cells) / 2


def test_tables_have_the_figures_of_their_files(tables, capfd):
    assert doctest.testmod(tables).failed == 0
    assert tables.main("--check", "--diff") == 0, "\n".join(["do: make tables", *capfd.readouterr()])


def test_each_table_of_figures_is_made_from_a_file_or_has_a_reason(tables, pages):
    shown = {name for text in pages.values() for name in re.findall(r'\[\[\[cog show\("(.+?)"', text)}
    assert shown == tables.BLOCKS.keys()
    rest = {
        (page, " | ".join(headers))
        for page, text in pages.items()
        for _, headers, lines in found(re.sub(r"^<!--\[\[\[cog.*?\[end\]", "", text, flags=re.MULTILINE | re.DOTALL))
        if has_figures(lines) and page not in FORMATS
    }
    assert rest == EXEMPT.keys()


def numbers(thing: Any) -> Iterable[float]:
    """Yield all numbers of a file; and the means of runs whose texts are equal, which differ by their seeds."""
    if isinstance(thing, bool) or thing is None or isinstance(thing, str):
        return
    if isinstance(thing, int | float):
        yield thing
        return
    parts = list(thing.values() if isinstance(thing, dict) else thing)
    for part in parts:
        yield from numbers(part)
    seeds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in parts if isinstance(thing, list) else []:
        if isinstance(row, dict) and "seed" in row:
            seeds.setdefault(tuple(text for text in row.values() if isinstance(text, str)), []).append(row)
    for runs in seeds.values():
        for name, first in runs[0].items():
            if isinstance(first, float):
                yield fmean(run[name] or 0.0 for run in runs)
            if name == "accuracy" and isinstance(first, list):
                yield fmean(run[name][-1] for run in runs)


def test_figures_in_tables_of_options_are_in_the_files_of_their_section(tables, pages):
    """Cells that cite a decision record have its figures. Numbers without a point are those of workers and the like."""
    checked = 0
    for page, text in pages.items():
        for section, headers, lines in found(text):
            files = set(re.findall(r"benchmarks/([\w-]+)\.json", section))
            if headers[-1] != "measured" or not files:
                continue
            pool = [n for file in files for n in numbers(tables.read(file))]
            for line in lines:
                cell = re.sub(r'\]\(\S+\)|"[^"]*"', "", line[-1])
                # Files count bytes.
                here = pool + [n / 1e6 for n in pool if n > 1e5] if " MB" in cell else pool
                figures = re.findall(r"(?<=\b1/)\d[\d,]*|(?<![\d.\w])\d[\d,]*\.\d+", cell)
                for figure in figures if "ADR" not in cell and re.search(r"\d\.\d", cell) else []:
                    digits = figure.replace(",", "")
                    half = 0.5 * 10.0 ** -len(digits.partition(".")[2])
                    near = any(abs(n - float(digits)) <= half for n in here)
                    assert near, f"docs/{page}: {cell}: {figure} is in none of {sorted(files)}"
                    checked += 1
    assert checked > 30


def test_errors_of_predictions_are_those_of_their_file(tables, pages):
    text = " ".join(pages["advise.md"].split())
    errors = [abs(case["predicted_ms"] / case["measured_ms"] - 1) for case in tables.predictions()]
    assert f"The median error is {100 * median(errors):.0f} %" in text
    within = sum(error <= 0.3 for error in errors)
    assert f"{within} of the {len(errors)} predictions are within 30 %" in text


def test_times_faster_on_the_first_page_are_in_their_file(tables, pages):
    """And those below the picture of docs/scaling.md, where some are of a strategy that is slower than one worker."""
    cases = {(row["model"], row["bandwidth"]) for row in tables.rows("scaling")}
    times = [row["faster"] for case in cases for row in tables.summary("scaling", *case)]
    below = re.search(r"^!\[.*\n\n((?:.+\n)+)", pages["scaling.md"], re.MULTILINE)[1]
    readme = re.findall(r"([\d.]+) (?:times as fast|and [\d.]+ times)", (ROOT / "README.md").read_text())
    assert readme
    assert set(readme) <= {f"{n:.1f}" for n in times}
    assert set(re.findall(r"\d\.\d", below)) <= {f"{n:.1f}" for n in times} | {f"{1 / n:.1f}" for n in times}
