"""Private names of Keras and TensorFlow, looks into frames and replaced methods are in hvdx/keras/seams only."""

import ast
from pathlib import Path

import pytest

ROOM = Path(__file__).resolve().parent.parent / "hvdx" / "keras"
SEAMS = ROOM / "seams"
# Looks into frames, closures and code of other functions.
LOOKS = {
    *("currentframe", "_getframe", "getclosurevars", "f_back", "f_locals", "f_globals", "f_code"),
    *("__closure__", "__code__", "__wrapped__", "MethodType"),
}
MODULES = ("keras.src", "tensorflow.python", "tf.__internal__")
# Python's own: the fields of a named tuple, and its copy with other values.
PUBLIC = {"_fields", "_replace"}
# Marks that hvdx leaves on objects of others.
OWN = "_hvdx_"


def is_private(name):
    return (
        len(name) > 1
        and name[0] == "_"
        and not name.startswith(("__", OWN))
        and name.isidentifier()
        and name not in PUBLIC
    )


def of_self(attribute):
    return getattr(attribute.value, "id", "") in ("self", "cls")


def definitions(tree):
    """Return the private names that a module defines: functions, classes, constants, and attributes of self."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            found.add(node.attr)
    return found


def names_behind(paths):
    """Return the private names of others, and the names of replaced methods, that the seams know."""
    private, replaced = set(), set()
    for path in paths:
        tree = ast.parse(path.read_text())
        own = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                (replaced if isinstance(node.ctx, ast.Store) else private).add(node.attr)
            elif isinstance(node, ast.FunctionDef) and node.name not in own:
                private.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                private.add(node.value)
                replaced.add(node.value)
    private = {name for name in private | replaced if is_private(name)}
    return private, replaced


def complaints(path, behind, inherited):
    """Yield what a file must not contain.

    Args:
        path: file of hvdx/keras.
        behind: result of `names_behind`.
        inherited: names that classes of hvdx define, which their subclasses may use.
    """
    private, replaced = behind
    tree = ast.parse(path.read_text())
    own = definitions(tree)
    functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    annotations = {id(part) for node in ast.walk(tree) for part in _annotations(node)}
    for node in ast.walk(tree):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}: "
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Constant):
            named = [node.value] if isinstance(node, ast.Constant) else [getattr(node, "module", None) or ""]
            named += [alias.name for alias in getattr(node, "names", [])]
            for name in named:
                if isinstance(name, str) and name.startswith(MODULES):
                    yield f"{where}{name} is a private module"
        if isinstance(node, ast.Attribute):
            mine = of_self(node)
            if ast.unparse(node) in ("inspect.stack", "tf.__internal__") or node.attr in LOOKS:
                yield f"{where}{node.attr}"
            elif is_private(node.attr):
                base = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
                known = own | inherited if mine or base else own
                if node.attr not in known or (node.attr in private and not (mine and node.attr in own)):
                    yield f"{where}{node.attr} is a private name of something else"
        if isinstance(node, ast.FunctionDef) and node.name in private and _is_method(node):
            yield f"{where}{node.name} overrides a private method"
        spelled = node.value if isinstance(node, ast.Constant) and id(node) not in annotations else None
        if isinstance(spelled, str) and is_private(spelled) and spelled not in functions:
            yield f"{where}{spelled!r} spells a private name"
        yield from (where + text for text in _replacements(node, functions, replaced))


def _is_method(node):
    return bool(node.args.args) and node.args.args[0].arg == "self"


def _annotations(node):
    for name in ("annotation", "returns"):
        part = getattr(node, name, None)
        if part is not None:
            yield from ast.walk(part)


def _replacements(node, functions, replaced):
    """Yield assignments of functions to attributes of other objects, and of anything to names that seams replace."""
    if isinstance(node, ast.Assign):
        targets = [part for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Attribute)]
        value = node.value
        is_function = isinstance(value, ast.Lambda) or getattr(value, "id", "") in functions
        for target in targets:
            if isinstance(target.ctx, ast.Store) and not of_self(target) and (is_function or target.attr in replaced):
                yield f"{target.attr} of another object is replaced"
    elif isinstance(node, ast.Delete):
        for target in node.targets:
            if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") != "self":
                yield f"{target.attr} of another object is deleted"
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
        # A constant such as _MARK = "_hvdx_elements" names what hvdx leaves.
        if not getattr(node.args[1], "id", "").isupper():
            yield f"{node.func.id} of a name that is no mark of hvdx"


def files():
    return [path for path in sorted(ROOM.rglob("*.py")) if SEAMS not in path.parents]


@pytest.fixture(scope="module")
def behind():
    return names_behind(SEAMS.glob("*.py"))


@pytest.fixture(scope="module")
def inherited():
    return set().union(*(definitions(ast.parse(path.read_text())) for path in files()))


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOM)))
def test_only_seams_touch_the_insides_of_keras(path, behind, inherited):
    assert list(complaints(path, behind, inherited)) == [], "move it to hvdx/keras/seams"


def test_private_names_of_keras_are_found(tmp_path, behind, inherited):
    file = tmp_path / "case.py"
    for code in (
        "model._flatten_layers()",
        "x._something_new",
        'getattr(optimizer, "_trainable_variables", ())',
        'import_module("keras.src.saving")',
        "from keras.src import backend",
        "tf.__internal__.tracking",
        "inspect.currentframe()",
        "sys._getframe(1)",
        "types.MethodType(f, optimizer)",
        "class A(keras.callbacks.ModelCheckpoint):\n def _save_model(self): pass",
        "class A(keras.metrics.Mean):\n def f(self): return self._fn",
        "class A(keras.metrics.Mean):\n def f(self): return self._never_heard_of",
        "optimizer.apply = other",
        "model.train_step = kept",
        "callback.anything = lambda: None",
        "def f(): pass\nmodel.new = f",
        'setattr(model, "train_step", f)',
        "del model.train_step",
    ):
        file.write_text(code)
        assert list(complaints(file, behind, inherited)), code
    for code in (
        "class A:\n def __init__(self, other):\n  self._mine = other._mine",
        '_MARK = "_hvdx_mark"\nsetattr(state, _MARK, 1)',
        "self.model.stop_training = True",
        "type(data)._fields",
    ):
        file.write_text(code)
        assert not list(complaints(file, behind, inherited)), code
