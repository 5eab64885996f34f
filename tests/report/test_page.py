"""The page of a report: complete in one file, with the numbers of its charts in tables."""

# Tests: hvdx/report/figures.py, hvdx/report/overview.py, hvdx/report/text.py

import json
import re
from html.parser import HTMLParser

import pytest

from hvdx.errors import ConfigError
from hvdx.report import figures, overview
from hvdx.report.overview import COMPARISON, Setting, load
from hvdx.report.text import text
from tests.report.synthetic import THIRTY, THREE, Verdict, write_comparison, write_failure, write_run

pytest.importorskip("matplotlib", reason="needs the extra: pip install 'hvdx[report]'")
pytest.importorskip("jinja2", reason="needs the extra: pip install 'hvdx[report]'")

from hvdx.report import page

VOID = {"meta", "br", "path", "use", "rect"}


class Outline(HTMLParser):
    """Elements of a page: checks that they are closed, and keeps their attributes and the text."""

    def __init__(self, html):
        super().__init__()
        self.open, self.elements, self.text, self.stray = [], [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), [each for each, _ in self.open]))
        if tag not in VOID:
            self.open.append((tag, attrs))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), [each for each, _ in self.open]))

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        if not self.open or self.open.pop()[0] != tag:
            self.stray.append(tag)

    def handle_data(self, data):
        self.text.append(data)

    def count(self, tag, inside=None):
        return sum(1 for name, _, above in self.elements if name == tag and (inside is None or inside in above))


def render(folder, **options):
    return page.render(load([folder], **options), Verdict(), folder.name)


def checked(html):
    """Return the outline of a page after the checks that every page passes."""
    outline = Outline(html)
    assert (outline.stray, outline.open) == ([], [])
    assert not re.search(r"https?://|//\w+\.\w+/|<script|<link|<img|@import", html)
    assert set(re.findall(r"url\((.)", html)) <= {"#"}
    names = [attributes["id"] for _, attributes, _ in outline.elements if "id" in attributes]
    assert len(names) == len(set(names)), "an identifier twice"
    for _, attributes, _ in outline.elements:
        assert attributes.get("href", "#").lstrip("#") in {"", *names}
        assert attributes.get("aria-labelledby", names[0]) in names
    assert all(
        attributes.get("aria-label") for tag, attributes, _ in outline.elements if attributes.get("role") == "img"
    )
    assert outline.count("figure") == outline.count("figcaption") == outline.count("table", inside="figure")
    return outline


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    write_comparison(folder, THREE, workers=(2, 4), outcome={"prediction": {"ms": 31.5}})
    write_failure(folder / "runs" / "bad", "ParameterServer()", "ExchangeError: rank 1 left")
    write_run(folder / "runs" / "half", "AllReduce()", end=False, seed=7, epochs=2)
    return folder


def test_page_has_the_verdict_first_and_a_table_for_each_chart(three):
    html = render(three, target=("val_accuracy", 0.85))
    outline = checked(html)
    titles = ["val_accuracy over time", "val_accuracy over epochs", "Time of a step", "Bytes of a step"]
    titles += ["Predicted and measured time of a step"]
    assert re.findall(r'<h2 id="figure-\d">(.*?)</h2>', html) == titles
    assert html.index("Threshold trains fastest.") < html.index('<h2 id="criteria"') < html.index('<svg class="chart"')
    assert outline.count("article") == 5
    for words in ("noise can explain the differences", "target: val_accuracy 0.85", "1,863,690 parameters"):
        assert words in html
    for words in (
        "2 workers: 100 Mbit/s, latency 0.2 ms; 4 workers: 100 Mbit/s",
        "node0; node1",
        "hvdx compare -n 2 -- python train.py",
        "31.5 ms",
    ):
        assert words in html


def test_long_verdicts_begin_with_what_the_criteria_do_not_repeat(tmp_path):
    write_run(tmp_path, "AllReduce()")
    verdict = Verdict([*(f"Sentence {i}." for i in range(9)), "Fastest training: Threshold(density=0.01)."])
    verdict.sentences.reverse()
    html = page.render(load([tmp_path]), verdict)
    top, rest = re.search(r'<div class="verdict">(.*?)</div>(.*?)</section>', html, re.DOTALL).groups()
    assert re.findall("<p>(.*?)</p>", top) == [f"Sentence {i}." for i in range(8, 0, -1)]
    assert "2 more sentences" in rest
    assert re.findall("<p>(.*?)</p>", rest) == ["Fastest training: Threshold(density=0.01).", "Sentence 0."]
    assert "more sentences" not in page.render(load([tmp_path]), Verdict())


def test_charts_and_tables_have_the_same_numbers(three):
    found = load([three])
    for figure in figures.draw(found):
        cells = {cell for row in figure.rows for cell in row}
        for _, svg in figure.panels:
            shown = [
                each for each in re.findall(r"<text[^>]*>([^<]*)</text>", svg) if each.endswith((" ms", " MB", " kB"))
            ]
            for each in shown:
                assert set(each.split(", ◆ ")) <= cells, each
            assert shown or "over" in figure.title
        for row in figure.rows:
            assert len(row) == len(figure.header)
    group = next(g for g in found.groups if g.strategy == "AllReduce()" and g.setting == Setting(2))
    point = group.curve("val_accuracy")[-1]
    by_epoch = next(f for f in figures.draw(found) if f.title.endswith("epochs"))
    assert ["AllReduce()", "2 workers"] in [row[:2] for row in by_epoch.rows]
    assert any(row[:2] == ["AllReduce()", "2 workers"] and row[5] == figures.spread(point) for row in by_epoch.rows)


def test_faulty_runs_are_listed_and_do_not_count(three):
    found = load([three])
    assert [(t.strategy, t.seed) for t in found.troubles] == [("ParameterServer()", "1"), ("AllReduce()", "7")]
    group = next(g for g in found.groups if g.strategy == "AllReduce()" and g.setting == Setting(2))
    assert (len(group.runs), len(group.counted)) == (4, 3)
    html = render(three)
    for words in ("ExchangeError: rank 1 left (exit code 1)", "bad/log.txt", "(epochs completed: 2)"):
        assert words in html
        assert words in text(found, "")


def test_hostile_text_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>\"'&$x$"
    write_run(tmp_path / "a", evil, header={"host": evil, "command": [evil], "model": {"name": evil}})
    write_failure(tmp_path / "b", evil, evil)
    verdict = Verdict(sentences=[evil])
    outline = checked(page.render(load([tmp_path]), verdict, evil))
    assert evil in "".join(outline.text)


@pytest.mark.parametrize(
    "options",
    [
        {"nan_from": 1},
        {"nan_from": 2},
        {"epochs": 1},
        {"epochs": 0},
        {"metric": "mae"},
        {"workers": 1},
        {"outcome": None},
        {"end": False},
        {"header": {"model": None, "versions": None, "link": None, "machine": None, "command": None, "batch": None}},
    ],
    ids=str,
)
def test_odd_runs_have_a_page(options, tmp_path):
    write_run(tmp_path, "AllReduce()", **options)
    html = render(tmp_path)
    outline = checked(html)
    assert ("NaN" in html) == ("nan_from" in options)
    assert outline.count("svg") > 0
    assert "AllReduce()" in text(load([tmp_path]), "") or options == {"workers": 1}


def test_only_failures_have_a_page(tmp_path):
    write_failure(tmp_path / "a", "AllReduce()", "no route to host")
    html = render(tmp_path)
    checked(html)
    assert "no route to host" in html
    assert "no route to host" in text(load([tmp_path]), "")


def test_thirty_strategies_are_ranked_and_most_are_grey(tmp_path):
    write_comparison(tmp_path, THIRTY, seeds=1)
    html = render(tmp_path)
    checked(html)
    assert "23 other strategies (in the table)" in html
    keys = re.findall(r"<b>(\w)</b><span>(.*?)</span>", html)[:7]
    assert [letter for letter, _ in keys] == [*"ABCDEF", "1"]
    assert keys[0][1].startswith("Threshold(density=0.028")
    assert html.count("density=0.005,") > 4


def test_a_metric_that_falls_ranks_the_lowest_first(tmp_path):
    for place, value in enumerate((0.9, 0.3)):
        write_run(tmp_path / f"{place}", f"Strategy{place}()", metric="val_loss", quality=value)
    found = load([tmp_path])
    assert (found.metric, found.rising) == ("val_loss", False)
    assert found.strategies == ["Strategy1()", "Strategy0()"]


def test_target_of_the_comparison_is_the_default(tmp_path):
    write_run(tmp_path / "a", "AllReduce()")
    (tmp_path / COMPARISON).write_text(json.dumps({"target": {"metric": "loss", "value": 0.5}}))
    assert load([tmp_path]).target == ("loss", 0.5)
    assert load([tmp_path], ("val_accuracy", 0.9)).target == ("val_accuracy", 0.9)


def test_runs_in_nested_folders_count_once(tmp_path):
    write_run(tmp_path / "a", "AllReduce()")
    write_failure(tmp_path / "b", "AllReduce()", "no route to host")
    found = load([tmp_path, tmp_path / "a", tmp_path / "b", tmp_path / "a" / ".." / "b"])
    assert (len(found.runs), len(found.troubles)) == (1, 1)


def test_folder_without_runs_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="expected records of runs"):
        load([tmp_path])


def test_settings_are_sorted_by_workers_and_rate():
    links = [Setting(2, "1gbit"), Setting(2, "10mbit"), Setting(2), Setting(1), Setting(2, "100mbit")]
    assert [str(each) for each in sorted(links, key=lambda each: each.order)] == [
        "one worker",
        "2 workers, 10 Mbit/s",
        "2 workers, 100 Mbit/s",
        "2 workers, 1 Gbit/s",
        "2 workers",
    ]


def test_missing_package_is_named(monkeypatch, tmp_path):
    write_run(tmp_path, "AllReduce()")
    for package in ("jinja2", "matplotlib"):
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, package, None)
            with pytest.raises(ConfigError, match=rf"{package}.*pip install .*{package}"):
                render(tmp_path)


def test_faults_of_a_run(tmp_path):
    from hvdx.report.records import RankRecord, Run

    ended = RankRecord({"size": 2}, end={"time": 1.0})
    assert overview.fault(Run(tmp_path, {0: ended, 1: ended})) == ""
    assert overview.fault(Run(tmp_path, {0: ended})) == "incomplete: 1 of 2 ranks have a record"
    failed = Run(tmp_path, {0: ended, 1: ended}, {"exit_code": 9, "reason": "killed"})
    assert overview.fault(failed) == "killed (exit code 9)"
