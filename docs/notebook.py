"""The notebook of a page: its text, and its code in cells that can be run."""

import re
from typing import Any

BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\((?!http)[^)]*\)")
_HEADERS = {"python": "%%writefile {script}\n", "sh": "%%bash\n"}


def notebook_of(page: str, script: str) -> dict[str, Any]:
    """Return a Jupyter notebook (nbformat 4) of a Markdown page.

    Args:
        page: the Markdown. Links to other pages become plain text.
        script: name of the file that cells of Python write; cells of shell commands run it.
    """
    cells: list[dict[str, Any]] = []

    def add(kind: str, source: str) -> None:
        if source.strip():
            code = {"execution_count": None, "outputs": []} if kind == "code" else {}
            cell = {"id": f"cell-{len(cells)}", "cell_type": kind, "metadata": {}, **code}
            cells.append({**cell, "source": source.strip("\n").splitlines(keepends=True)})

    end = 0
    for block in BLOCK.finditer(page):
        add("markdown", _LINK.sub(r"\1", page[end : block.start()]))
        add("code", _HEADERS[block[1]].format(script=script) + block[2])
        end = block.end()
    add("markdown", _LINK.sub(r"\1", page[end:]))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}
