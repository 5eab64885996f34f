"""A browser shows the page of a report on a phone and on a wide screen, light and dark."""

# Tests: hvdx/report/page.py

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from hvdx.report import page
from hvdx.report.overview import load
from tests.report.synthetic import THIRTY, THREE, Verdict, write_comparison, write_failure

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (390, 1400)
SCHEMES = ("light", "dark")
LONG = "Threshold(target_density='auto', codec='bf16', lookahead=0.9, placement='update', seed=1)"

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")

# Added to the copy of the page that the browser loads: measures the page and sends the result to the page around it.
PROBE = """<script>
addEventListener("load", () => {
  document.querySelectorAll("details").forEach(each => { each.open = true; });
  const cut = [], overlapping = [];
  for (const svg of document.querySelectorAll("svg.chart")) {
    const frame = svg.getBoundingClientRect(), boxes = [];
    for (const text of svg.querySelectorAll("text")) {
      const box = text.getBoundingClientRect(), name = text.textContent;
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
          || box.bottom > frame.bottom + 1 || box.right > innerWidth) cut.push(name);
      for (const [other, its] of boxes)
        if (box.left < its.right - 1 && its.left < box.right - 1
            && box.top < its.bottom - 4 && its.top < box.bottom - 4)
          overlapping.push(`${other} | ${name}`);
      boxes.push([name, box]);
    }
  }
  const sizes = [...document.querySelectorAll("svg.chart")].map(
    svg => 12 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width);
  const outside = [...document.querySelectorAll("body *")].filter(
    each => !each.closest(".scroll, svg, pre") && each.getBoundingClientRect().right > innerWidth + 1);
  parent.postMessage({
    name: name, width: innerWidth, scroll: document.documentElement.scrollWidth, cut: cut, overlapping: overlapping,
    smallest: Math.min(...sizes), outside: outside.map(each => each.tagName + " " + each.textContent.slice(0, 40)),
    paper: getComputedStyle(document.body).backgroundColor, charts: document.querySelectorAll("svg.chart").length,
    painted: getComputedStyle(document.querySelector("svg.chart text")).fill,
  }, "*");
});
</script>"""
COLLECTOR = """<script>
const found = [];
addEventListener("message", event => {
  found.push(event.data);
  document.querySelector("output").textContent = JSON.stringify(found);
});
</script>"""


def browse(*options):
    """Start the browser once; return its output and what it complained about."""
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
    ]
    command += ["--virtual-time-budget=4000", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def frames(files, height):
    """Return a page with a frame for each file, width and scheme."""
    parts = [
        f'<iframe name="{file.stem} {width} {scheme}" src="{file.name}" width="{width}" height="{height}" '
        f'style="border: 0; color-scheme: {scheme}"></iframe>'
        for file in files
        for width in WIDTHS
        for scheme in SCHEMES
    ]
    return f"<!DOCTYPE html><body style='margin: 0; white-space: nowrap'>{COLLECTOR}<output></output>{''.join(parts)}"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write the pages of two comparisons, with 3 and 30 strategies."""
    folder = tmp_path_factory.mktemp("pages")
    write_comparison(
        folder / "three", (*THREE, LONG), bandwidths=("100mbit", "1gbit"), outcome={"prediction": {"ms": 30}}
    )
    write_failure(folder / "three" / "runs" / "bad", "ParameterServer()", "ExchangeError: " + "x" * 300)
    write_comparison(folder / "thirty", THIRTY, seeds=1)
    for name in ("three", "thirty"):
        text = page.render(load([folder / name]), Verdict(), name)
        (folder / f"{name}.html").write_text(text.replace("</body>", f"{PROBE}</body>"))
    return folder


def test_nothing_is_cut_off_at_any_width_and_scheme(pages):
    harness = pages / "frames.html"
    harness.write_text(frames([pages / "three.html", pages / "thirty.html"], 900))
    dom, complaints = browse("--window-size=3000,2000", "--dump-dom", harness.as_uri())
    assert complaints == []
    found = json.loads(unescape(re.search(r"<output>(.*?)</output>", dom, re.DOTALL)[1]))
    assert len(found) == 2 * len(WIDTHS) * len(SCHEMES)
    papers = set()
    for each in found:
        assert each["charts"] > 0
        assert each["scroll"] <= each["width"], each
        assert (each["cut"], each["outside"], each["overlapping"]) == ([], [], []), each
        assert each["smallest"] >= 10.5, each
        assert each["painted"] not in (each["paper"], "rgb(0, 0, 0)")
        papers.add((each["name"].split()[-1], each["paper"]))
    assert len(papers) == len({paper for _, paper in papers}) == len(SCHEMES), papers


def test_screenshots_are_kept(pages):
    harness = pages / "screenshot.html"
    harness.write_text(frames([pages / "three.html"], 3000))
    _, complaints = browse("--window-size=3600,3000", f"--screenshot={pages / 'three.png'}", harness.as_uri())
    assert complaints == []
    assert (pages / "three.png").stat().st_size > 50_000
