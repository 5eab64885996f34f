"""Signatures between an adapter of Keras and the bytes name their types, so that a reader can follow them."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("codec", "comm", "costs", "strategies")
# The protocol of late messages moves payloads of any type.
ANY_PAYLOAD = "hvdx/strategies/threshold/routes/replica.py"
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
