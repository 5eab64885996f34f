"""Imports agree with the table of rooms in docs/architecture.md, and have no circles, of packages neither."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMUNICATION = {"mpi4py", "horovod"}

# room: packages it may import besides the standard library and itself; None: anything that NEVER does not list.
MAY = {
    "kernels": {"numpy", "numba", "llvmlite"},
    "errors": set(),
    "cache": set(),
    "version": set(),
    "foreign": set(),
    "log": {"hvdx.foreign"},
    "codec": {"numpy", "xxhash", "hvdx.kernels", "hvdx.cache", "hvdx.errors"},
    "costs": {"numpy", "hvdx.comm", "hvdx.codec"},
    "strategies": {"numpy", "hvdx.comm", "hvdx.codec", "hvdx.costs", "hvdx.errors", "hvdx.log"},
    "simulation": {"numpy", "hvdx.comm", "hvdx.strategies", "hvdx.costs", "hvdx.errors"},
    "report": {"numpy", "matplotlib", "jinja2", "hvdx.errors", "hvdx.foreign", "hvdx.log"},
    "comm": None,
    "keras": {
        *("numpy", "tensorflow", "keras", "xxhash"),
        *("hvdx.strategies", "hvdx.comm", "hvdx.costs", "hvdx.report", "hvdx.errors", "hvdx.log", "hvdx.version"),
        "hvdx.foreign",
        # Checkpoints are written by the functions that write the files of `hvdx average`.
        *("hvdx.averaging.dtypes", "hvdx.averaging.extents", "hvdx.averaging.output", "hvdx.averaging.safetensors"),
    },
    "averaging": None,
    "cli": {"packaging", "hvdx"},
    "jobs": None,
}
# Modules of hvdx that example jobs may import: public ones, and tables. Benchmarks may import internals.
PUBLIC = {"hvdx", "hvdx.keras", "hvdx.keras.layers", "hvdx.report", "hvdx.report.summary", "hvdx.report.table"}
NEVER = {
    "comm": {"hvdx.codec", "hvdx.kernels", "hvdx.keras", "hvdx.strategies", "keras", "numba"},
    "averaging": {"mpi4py", "horovod", "hvdx.comm"},
}


def sources():
    """Yield (room, file) for every Python file that is installed."""
    for folder, package in (("hvdx", None), ("kernels", "kernels"), ("jobs", "jobs")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if package or parts[0] not in ("__init__", "__main__"):
                yield package or parts[0], path


def imports(path):
    """Yield (module, names, line) of every import in a file, `import_module("...")` included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, [], node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield node.module, [alias.name for alias in node.names], node.lineno
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            yield from ((a.value, [], node.lineno) for a in node.args[:1] if isinstance(a, ast.Constant))


def within(module, names, packages):
    """Return whether `module`, or a name imported from it, is in one of `packages`."""
    spelled = [module, *(f"{module}.{name}" for name in names)]
    return any(m == p or m.startswith(p + ".") for m in spelled for p in packages)


def complaints(room, path):
    """Yield the imports of one file that the table forbids."""
    allowed, banned = MAY[room], NEVER.get(room, set())
    seen = set()
    for module, names, line in imports(path):
        top, where = module.split(".")[0], f"{path.relative_to(ROOT)}:{line}: {module}"
        seen |= {top} & COMMUNICATION
        own = within(module, names, {f"hvdx.{room}"})
        known = own or top in sys.stdlib_module_names
        if allowed is not None and not known and not within(module, names, allowed):
            yield f"{where}: {room} may import {sorted(allowed)} only"
        if within(module, names, banned):
            yield f"{where}: {room} may not import it"
        if path.parent == ROOT / "jobs" and top == "hvdx" and not own and module not in PUBLIC:
            yield f"{where}: a job to read imports {sorted(PUBLIC)} only"
        if room in ("jobs", "cli") and top == "hvdx":
            for name in [*module.split("."), *names]:
                if name.startswith("_") and not name.startswith("__"):
                    yield f"{where}: {name} has an underscore"
    if room == "comm" and len(seen) > 1:
        yield f"{path}: {sorted(seen)}: one communication library a file"


@pytest.mark.parametrize(("room", "path"), list(sources()), ids=lambda v: str(getattr(v, "name", v)))
def test_rooms_import_what_they_may(room, path):
    assert room in MAY, f"{path}: a room that the table does not know"
    assert list(complaints(room, path)) == []


def test_table_can_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    cases = {
        "kernels": "from hvdx.errors import HvdxError",
        "costs": "from hvdx.strategies.contract import Strategy",
        "strategies": "import keras",
        "keras": "from hvdx.codec import make",
        "comm": "import mpi4py\nfrom horovod import tensorflow",
        "cli": "from hvdx.keras.fit.data import _shard_arrays",
        "jobs": "from hvdx.keras.fit.data import shard",
    }
    for room, code in cases.items():
        path = tmp_path / room / "case.py"
        path.parent.mkdir()
        path.write_text(code)
        assert list(complaints(room, path)), room


def name_of(path):
    """Return the module name of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "hvdx" else ("hvdx", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def graph_of(paths):
    """Return {module: modules of hvdx that it imports}, imports in functions and for type checking included."""
    files = {name_of(path): path for path in paths}
    graph = {module: set() for module in files}
    for module, path in files.items():
        for source, names, _ in imports(path):
            inner = {f"{source}.{name}" for name in names} & files.keys()
            # `from package import module` imports only the module.
            graph[module] |= inner | ({source} & files.keys() if len(inner) < max(len(names), 1) else set())
    return graph


def circle_in(graph):
    """Return a circle of modules in the order of their imports, or []."""
    done, trail = set(), []

    def search(module):
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module not in done:
            trail.append(module)
            for other in sorted(graph[module]):
                found = search(other)
                if found:
                    return found
            done.add(trail.pop())
        return []

    return next(filter(None, map(search, graph)), [])


def test_no_modules_import_each_other():
    assert circle_in(graph_of(path for _, path in sources())) == []


def test_circle_is_found():
    assert circle_in({"a": {"b", "d"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}) == ["b", "c", "b"]


def children_of(package, graph):
    """Return the graph of the modules and packages directly in a package; edges are imports from one into another."""
    children = {module: ".".join(module.split(".")[: package.count(".") + 2]) for module in graph}
    inside = [module for module in graph if module.startswith(f"{package}.")]
    found = {children[module]: set() for module in inside}
    for module in inside:
        found[children[module]] |= {children[o] for o in graph[module] if o in inside} - {children[module]}
    return found


def packages_in(graph):
    """Return the rooms that are packages, and the packages in them."""
    names = [module.split(".") for module in graph]
    return sorted({".".join(name[:depth]) for name in names for depth in range(2, len(name))})


def test_no_packages_import_each_other():
    graph = graph_of(path for _, path in sources())
    assert {p: c for p in packages_in(graph) if (c := circle_in(children_of(p, graph)))} == {}


def test_circle_of_packages_is_found():
    graph = {"hvdx.r.a.x": {"hvdx.r.b.x"}, "hvdx.r.a.y": set(), "hvdx.r.b.x": set(), "hvdx.r.b.y": {"hvdx.r.a.y"}}
    assert circle_in(graph) == []
    assert packages_in(graph) == ["hvdx.r", "hvdx.r.a", "hvdx.r.b"]
    assert circle_in(children_of("hvdx.r", graph)) == ["hvdx.r.a", "hvdx.r.b", "hvdx.r.a"]


def reached(graph, module):
    """Return the modules of hvdx that a module imports, and that these import in turn."""
    found, waiting = set(), [module]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_contract_of_a_strategy_needs_nothing_that_measures():
    files = {name_of(path): path for _, path in sources()}
    found = reached(graph_of(files.values()), "hvdx.strategies.contract")
    assert {"hvdx.comm.interfaces", "hvdx.costs.types"} <= found
    assert not found & {"hvdx.costs.measure", "hvdx.costs.link"}
    assert [m for m in sorted(found) if {"socket", "mpi4py"} & {name for name, *_ in imports(files[m])}] == []


def strategies():
    """Return the names of the concrete strategies and exchanges in `strategies/`."""
    found = {"Strategy", "Exchange", "HostExchange", "MessageExchange"}
    abstract, classes = set(found), {}
    for path in (ROOT / "hvdx/strategies").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
    while more := {name for name, bases in classes.items() if bases & found} - found:
        found |= more
    return found - abstract


def types_asked_for(tree):
    """Yield (name, line) of every class in a test for a type: `isinstance`, `type(x) is` and `case`."""
    for node in ast.walk(tree):
        asked = []
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            asked = node.args[1:]
        elif isinstance(node, ast.Compare) and any(
            isinstance(side, ast.Call) and getattr(side.func, "id", "") == "type"
            for side in (node.left, *node.comparators)
        ):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        for part in (part for a in asked for part in ast.walk(a)):
            yield getattr(part, "id", getattr(part, "attr", "")), node.lineno


def test_no_module_asks_for_the_class_of_a_strategy():
    known = strategies()
    for room, path in sources():
        if room != "strategies":
            asked = types_asked_for(ast.parse(path.read_text()))
            assert [f"{path}:{line}: {name}" for name, line in asked if name in known] == []


def test_check_for_the_class_of_a_strategy_is_found():
    assert {"AllReduce", "Auto", "ParameterAveraging", "ParameterServer", "Threshold", "TrialExchange"} <= strategies()
    for code in (
        "isinstance(x, (int, hvdx.Threshold))",
        "isinstance(x, int | Threshold)",
        "type(x) is Threshold",
        "match x:\n case Threshold(tau=1): pass",
    ):
        assert "Threshold" in dict(types_asked_for(ast.parse(code))), code
