"""Links of the documentation resolve, its pictures are those of a command, and the FAQ quotes messages of the code."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from PIL import Image

from tests.launch import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, in the form of GitHub and MkDocs."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_pictures_are_those_of_the_command():
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs" / "make_pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    for name, content in pictures.pictures().items():
        assert (pictures.PICTURES / name).read_text() == content, "do: python docs/make_pictures.py"
    wide, narrow = (Image.open(pictures.PICTURES / f"comparison{form}.png") for form in pictures.FORMS)
    assert pictures.stacked(wide).tobytes() == narrow.tobytes(), "do: python docs/make_pictures.py"


def test_pictures_of_pages_have_a_narrow_form():
    """The site shows it on a phone, where 360 pixels are the width of a page."""
    shown = {name for page in PAGES for name in re.findall(r"!\[[^\]]*\]\((\S+)\)", page.read_text())}
    assert len(shown) > 3
    for name in shown:
        narrow = ROOT / "docs" / "pictures" / f"{Path(name).stem}-narrow{Path(name).suffix}"
        assert narrow.exists(), name


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_first_install_line_brings_what_the_commands_promise(page):
    """`hvdx compare` promises a page, and the jobs have data."""
    extras = re.search(r"^pip install -e '\.\[(.*?)\]'", (ROOT / page).read_text(), re.MULTILINE)[1].split(",")
    assert {"tf", "mpi", "jobs", "report"} <= set(extras)


def test_code_of_the_first_page_fits_a_window_of_1280_pixels():
    """The site shows 80 columns of code at that width, and continues longer lines on the next line."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 80
    (css,) = re.findall(r"^extra_css: \[(.*)\]", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert "white-space: pre-wrap" in (ROOT / "docs" / css).read_text()


@pytest.mark.parametrize(
    "page",
    ["advise", "averaging", "batch", "codecs", "compare", "containers", "decentralised", "faq", "gpu-cluster", "guide"]
    + ["install", "jobs", "lab", "records", "report", "scaling", "simulate", "split-layers", "survive", "tutorial"],
)
def test_pages_for_users_count_workers(page):
    """A rank is the number of a worker, as in "rank 0"; blocks of code quote the code and its messages."""
    text = re.sub(r"^```.*?^```", "", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    one, many = "all|any|each|every|another|one|an?", "several|other|more|many|both|two|four|of|on|over|than|between"
    counted = rf"\b(?:(?:{one}|{many}) ranks|(?:{one}) rank)\b"
    assert re.findall(counted, re.sub(r"`[^`]*`|\]\(\S*\)", "", text).replace("\n", " "), re.IGNORECASE) == []


def test_readme_is_one_screen_and_a_half():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def texts(module: Path) -> list[str]:
    """Return the texts in a module; a placeholder is NUL."""
    found = []
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_faq_quotes_messages_of_the_code():
    """Blocks without a language quote messages, with "..." in place of names and numbers, or of the rest."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "docs" / "faq.md").read_text(), re.MULTILINE | re.DOTALL)
    quotes = [line for language, block in blocks if not language for line in block.splitlines()]
    assert len(quotes) > 30
    messages = "\n".join(text for path in sorted((ROOT / "hvdx").rglob("*.py")) for text in texts(path))
    for quote in quotes:
        parts = [re.escape(part.strip()) for part in quote.split("...")]
        assert re.search(".*".join(parts), messages), quote


def missing_test(node):
    """Return the part of a node id of pytest, file or function, that is missing; "" if both exist."""
    file, _, rest = node.partition("::")
    function = rest.partition("[")[0].rpartition("::")[2]
    if not (ROOT / file).is_file():
        return f"there is no {file}"
    return "" if f"def {function}(" in (ROOT / file).read_text() else f"there is no {function} in {file}"


def test_claims_name_tests_that_exist():
    assert missing_test("tests/test_docs.py::missing_test[a::b-2]") == ""
    assert missing_test("tests/test_docs.py::test_nothing") == "there is no test_nothing in tests/test_docs.py"
    page = (ROOT / "docs" / "claims.md").read_text()
    nodes = re.findall(r"`(tests/\S+::\S+)`", page)
    assert len(nodes) > 30
    assert not list(filter(None, map(missing_test, nodes)))
    for path in re.findall(r"`(?:python )?((?:jobs|docs|\.ci)/\S+)`", page):
        assert (ROOT / path).exists(), path


def test_claims_cover_the_commands_and_strategies_of_the_first_page():
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/claims.md"))
    commands = set(re.findall(r"\bhvdx [a-z]+(?:-[a-z]+)*\b(?= |`|$)", readme, re.MULTILINE))
    commands = {name for name in commands if (ROOT / "hvdx" / "cli" / f"{name[5:].replace('-', '_')}.py").exists()}
    strategies = set(re.findall(r"^\| \[?`(\w+)\(", readme, re.MULTILINE))
    assert len(commands) > 7
    assert len(strategies) == 5
    assert not {name for name in commands | strategies if f"`{name}" not in page}
