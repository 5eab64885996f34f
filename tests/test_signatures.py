"""Types have names, so that a reader can follow a gradient from Keras to the bytes."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("codec", "comm", "costs", "strategies")
# The protocol of late messages moves payloads of any type.
ANY_PAYLOAD = "hvdx/strategies/threshold/replica.py"
# All that is installed. `Any` remains where a value has no type: JSON, Keras' logs, and objects of a user.
PRODUCT = sorted(path for room in ("hvdx", "kernels", "jobs") for path in (ROOT / room).rglob("*.py"))
MOST = 300
FILES = [path for room in ROOMS for path in sorted((ROOT / "hvdx" / room).rglob("*.py"))]


def names_in(annotation):
    """Yield the names in an annotation, also in one that is a string."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from names_in(ast.parse(node.value, mode="eval"))
        elif isinstance(node, ast.Name | ast.Attribute):
            yield getattr(node, "id", getattr(node, "attr", ""))


def vague(tree):
    """Yield (function, line) of each signature that says Any."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = node.args
            arguments = [*found.posonlyargs, *found.args, *found.kwonlyargs, found.vararg, found.kwarg]
            annotations = [a.annotation for a in arguments if a is not None] + [node.returns]
            if any("Any" in names_in(annotation) for annotation in annotations if annotation is not None):
                yield node.name, node.lineno


def test_signatures_name_their_types():
    found = {str(path.relative_to(ROOT)): list(vague(ast.parse(path.read_text()))) for path in FILES}
    assert {path: where for path, where in found.items() if where and path != ANY_PAYLOAD} == {}


@pytest.mark.parametrize("code", ["def f(a: Any): ...", "def f(*, a: 'list[Any]'): ...", "def f() -> typing.Any: ..."])
def test_vague_signature_is_found(code):
    assert list(vague(ast.parse(code))) == [("f", 1)]


def times_any(text):
    """Count the word Any in a source, imports and annotations in strings included."""
    return len(re.findall(r"\bAny\b", text))


def test_any_is_rare():
    counts = {str(path.relative_to(ROOT)): times_any(path.read_text()) for path in PRODUCT}
    most = sorted(counts, key=counts.__getitem__, reverse=True)[:5]
    assert sum(counts.values()) < MOST, f"most are in {most}. Name the types; hvdx/keras/types.py has those of Keras."


def test_any_is_counted():
    assert times_any('from typing import Any\nx: "dict[str, Any]" = many  # AnyOther') == 2
