"""docs/extending.md shows the files that tests/ranks/test_extending.py runs, each in at most 40 lines."""

import re

import pytest

from tests.launch import ROOT

PACKAGE = ROOT / "tests" / "fixtures" / "extension" / "hvdx_example"


@pytest.mark.parametrize(("number", "file"), [(0, "strategy.py"), (1, "codec.py"), (2, "route.py")])
def test_page_shows_the_tested_files(number, file):
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)[number]
    code = (PACKAGE / file).read_text()
    assert shown == code
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
