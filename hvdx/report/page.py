"""A report as one HTML file, without scripts and without references to other files."""

import shlex
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdx.report import report_file
from hvdx.report.charts import missing, patterns
from hvdx.report.figures import draw, duration, results
from hvdx.report.overview import LOG, Overview, distinct, fault, name_of, seed_of, setting_of
from hvdx.report.records import Run
from hvdx.report.table import quantity

if TYPE_CHECKING:
    from hvdx.report.verdict import Verdict

#: What the head of a page says about its origin.
GENERATOR = "hvdx report"
#: A page as a file.
KIND = report_file.Kind("report", "report", f'name="generator" content="{GENERATOR}"'.encode())
#: Most sentences of the verdict at the top of a page; the others open below them.
SENTENCES = 8

_TEMPLATE = Path(__file__).with_name("templates") / "report.html.j2"


def render(overview: Overview, verdict: "Verdict", name: str = "") -> str:
    """Write a report as HTML.

    Args:
        name: name of the report, such as that of its folder.

    Raises:
        ConfigError: without Matplotlib or Jinja.
    """
    try:
        import jinja2
    except ImportError as error:
        raise missing("jinja2") from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    header, rows = results(overview)
    first, others = _sentences(verdict)
    return environment.from_string(_TEMPLATE.read_text()).render(
        generator=GENERATOR,
        name=name,
        subtitle=_subtitle(overview),
        sentences=first,
        more_sentences=others,
        criteria=[list(found) for _, found in groupby(verdict.criteria, lambda criterion: criterion.setting)],
        figures=draw(overview),
        patterns=patterns(),
        results_header=header,
        results=rows,
        troubles=overview.troubles,
        runs_header=("strategy", "setting", "seed", "state", "epochs", "time of the fit", "log"),
        runs=[_row(run) for run in overview.runs],
        environment=_environment(overview),
        commands=_commands(overview),
    )


def _sentences(verdict: "Verdict") -> tuple[list[str], list[str]]:
    """Divide a long verdict: the sentences to begin with, and those that repeat the criteria or are too many."""
    if len(verdict.sentences) <= SENTENCES:
        return verdict.sentences, []
    repeated = {criterion.sentence for criterion in verdict.criteria}
    own = [sentence for sentence in verdict.sentences if sentence not in repeated]
    first = (own or verdict.sentences)[:SENTENCES]
    return first, [sentence for sentence in verdict.sentences if sentence not in first]


def _subtitle(overview: Overview) -> str:
    counts = (
        (len(overview.strategies), "strategy", "strategies"),
        (len({group.setting for group in overview.groups}), "setting", "settings"),
        (len(overview.runs), "run", "runs"),
    )
    words = [f"{count} {one if count == 1 else many}" for count, one, many in counts]
    troubles = len(overview.troubles)
    return ", ".join([*words, *([f"{troubles} failed or incomplete"] if troubles else [])])


def _row(run: Run) -> list[str]:
    log = run.folder / LOG
    return [
        name_of(run),
        str(setting_of(run)),
        seed_of(run, run.outcome),
        fault(run) or "complete",
        str(len(run.epochs)),
        duration(run.seconds),
        str(log if log.exists() else run.folder),
    ]


def _environment(overview: Overview) -> list[tuple[str, str]]:
    """Return the environment of the runs: (name, the different values)."""
    headers = [rank.header for run in overview.runs for rank in run.ranks.values()]

    def part(name: str) -> list[dict[str, Any]]:
        return [found for header in headers if isinstance(found := header.get(name), dict)]

    found = [
        ("hosts", distinct(header.get("host") for header in headers)),
        ("processors", distinct(_processor(machine) for machine in part("machine"))),
        ("memory", distinct(_quantity(machine.get("memory"), "B") for machine in part("machine"))),
        ("links, as measured", _links(overview)),
        ("model", distinct(_model(model) for model in part("model"))),
        ("optimiser", distinct(optimizer.get("name") for optimizer in part("optimizer"))),
        ("samples per step and worker", distinct(header.get("batch") for header in headers)),
    ]
    versions = part("versions")
    found.append(("backend of Keras", distinct(header.get("backend") for header in headers)))
    names = dict.fromkeys(name for version in versions for name in version)
    found += [(f"{name}, version", distinct(version.get(name) for version in versions)) for name in names]
    return [(name, text) for name, text in found if text]


def _processor(machine: dict[str, Any]) -> str:
    cores, threads = machine.get("cores"), machine.get("threads")
    words = [str(machine.get("cpu") or ""), _count(cores, "core"), _count(threads, "compute thread")]
    return ", ".join(word for word in words if word)


def _count(count: object, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}" if count else ""


def _links(overview: Overview) -> str:
    """Return the links of each setting as measured, from the slowest to the fastest measurement."""
    found: dict[str, list[dict[str, float]]] = {}
    for run in overview.runs:
        for rank in run.ranks.values():
            link = rank.header.get("link")
            if isinstance(link, dict) and all(isinstance(link.get(n), int | float) for n in ("bandwidth", "latency")):
                found.setdefault(str(setting_of(run)), []).append(link)
    texts = []
    for setting, links in found.items():
        rates = [quantity(8 * end(link["bandwidth"] for link in links), "bit/s") for end in (min, max)]
        delays = [duration(end(link["latency"] for link in links)) for end in (min, max)]
        rate, delay = (" to ".join(dict.fromkeys(ends)) for ends in (rates, delays))
        texts.append(f"{setting}: {rate}, latency {delay}")
    return "; ".join(texts)


def _model(model: dict[str, Any]) -> str:
    parameters = model.get("parameters")
    count = f"{parameters:,} parameters" if isinstance(parameters, int) else ""
    return ", ".join(word for word in (str(model.get("name") or ""), count, str(model.get("dtype") or "")) if word)


def _quantity(value: object, unit: str) -> str:
    return quantity(value, unit) if isinstance(value, int | float) else ""


def _commands(overview: Overview) -> list[str]:
    """Return the commands that make the runs and the report again."""
    made = overview.comparison.get("hvdx_command")
    commands = [str(made)] if made else list(dict.fromkeys(_command(run) for run in overview.runs))
    folders = " ".join(shlex.quote(str(folder)) for folder in overview.folders)
    return [*(command for command in commands if command), f"hvdx report {folders}"]


def _command(run: Run) -> str:
    words = run.header.get("command")
    if not isinstance(words, list) or not words:
        return ""
    program = shlex.join(str(word) for word in words)
    launcher = "" if run.size == 1 else f"hvdx run -n {run.size} "
    settings = {"HVDX_STRATEGY": run.header.get("spelling"), "HVDX_SEED": run.header.get("seed")}
    before = "".join(f"{name}={shlex.quote(str(v))} " for name, v in settings.items() if v not in (None, ""))
    return f"HVDX_RECORD=RECORD {before}{launcher}{program}"
