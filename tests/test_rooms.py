"""Imports agree with the table of rooms in docs/architecture.md, and have no circles, of packages neither."""

import ast
import re
import sys
from pathlib import Path

import grimp
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
    "costs": {"numpy", "hvdx.comm", "hvdx.codec", "hvdx.errors"},
    "strategies": {"numpy", "hvdx.comm", "hvdx.codec", "hvdx.costs", "hvdx.errors", "hvdx.log"},
    "simulation": {"numpy", "hvdx.comm", "hvdx.strategies", "hvdx.costs", "hvdx.errors"},
    "report": {"numpy", "matplotlib", "jinja2", "hvdx.errors", "hvdx.foreign", "hvdx.log"},
    "comm": None,
    "keras": {
        *("numpy", "tensorflow", "jax", "torch", "keras", "xxhash"),
        *("hvdx.strategies", "hvdx.comm", "hvdx.costs", "hvdx.report", "hvdx.errors", "hvdx.log", "hvdx.version"),
        "hvdx.foreign",
        # Checkpoints are written by the functions that write the files of `hvdx average`.
        *("hvdx.averaging.extents", "hvdx.averaging.network", "hvdx.averaging.output", "hvdx.averaging.safetensors"),
    },
    "averaging": None,
    "cli": {"packaging", "hvdx"},
    "jobs": None,
}
# Modules of hvdx that example jobs may import: public ones, and tables. Benchmarks may import internals.
PUBLIC = {"hvdx", "hvdx.keras", "hvdx.keras.layers", "hvdx.report", "hvdx.report.table"}
NEVER = {
    "comm": {"hvdx.codec", "hvdx.kernels", "hvdx.keras", "hvdx.strategies", "keras", "numba"},
    "averaging": {"mpi4py", "horovod", "hvdx.comm"},
}


@pytest.fixture(scope="module")
def graph():
    """Graph of the imports, those in functions, for type checking and by `import_module("...")` included."""
    found = grimp.build_graph("hvdx", include_external_packages=True, cache_dir=None)
    for module in rooms(found):
        for package in re.findall(r'import_module\("(\w+)', text_of(module)):
            found.add_import(importer=module, imported=package)
    return found


def rooms(graph):
    """Return {module: its room}, of everything that is installed."""
    names = {module: [*module.split("."), ""] for module in sorted(graph.modules)}
    return {module: room for module, (top, room, *_) in names.items() if top == "hvdx" and room not in ("", "__main__")}


def text_of(module):
    """Return the source of a module."""
    path = ROOT / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def within(module, packages):
    """Return whether a module is in one of `packages`."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def complaints(graph, module, room):
    """Yield the imports of one module that the table forbids."""
    allowed, banned = MAY[room], NEVER.get(room, set())
    example = room == "jobs" and not within(module, {"hvdx.jobs.benchmarks"})
    imported = graph.find_modules_directly_imported_by(module)
    for other in sorted(imported):
        own = within(other, {f"hvdx.{room}"})
        if allowed is not None and not own and other not in sys.stdlib_module_names and not within(other, allowed):
            yield f"{module}: {other}: {room} may import {sorted(allowed)} only"
        if within(other, banned):
            yield f"{module}: {other}: {room} may not import it"
        if example and within(other, {"hvdx"}) and not own and other not in PUBLIC:
            yield f"{module}: {other}: a job to read imports {sorted(PUBLIC)} only"
    if room == "comm" and len(imported & COMMUNICATION) > 1:
        yield f"{module}: {sorted(imported & COMMUNICATION)}: one communication library a file"


def underscored(text):
    """Yield the names with an underscore that a source imports from hvdx."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            words = ".".join([getattr(node, "module", None) or "", *(alias.name for alias in node.names)]).split(".")
            yield from (w for w in words if "hvdx" in words and w.startswith("_") and not w.startswith("__"))


def circle_in(graph):
    """Return a circle of modules in the order of their imports, or ()."""
    pairs = ((module, other) for module in rooms(graph) for other in graph.find_modules_directly_imported_by(module))
    chains = (graph.find_shortest_chain(importer=other, imported=module) for module, other in pairs)
    return next(filter(None, chains), ())


def test_rooms_import_what_they_may(graph):
    assert set(rooms(graph).values()) == set(MAY)
    assert graph.direct_import_exists(importer="hvdx.comm.horovod", imported="horovod")
    assert [complaint for item in rooms(graph).items() for complaint in complaints(graph, *item)] == []


def test_jobs_and_commands_import_no_names_with_an_underscore(graph):
    found = {
        module: list(underscored(text_of(module))) for module, room in rooms(graph).items() if room in ("jobs", "cli")
    }
    assert {module: names for module, names in found.items() if names} == {}


def test_table_can_fail():
    cases = {
        "kernels": ["hvdx.errors"],
        "costs": ["hvdx.strategies.contract"],
        "strategies": ["keras"],
        "keras": ["hvdx.codec"],
        "comm": ["mpi4py", "horovod"],
        "jobs": ["hvdx.keras.fit.data"],
    }
    for room, imported in cases.items():
        graph = grimp.ImportGraph()
        for other in imported:
            graph.add_import(importer=f"hvdx.{room}.case", imported=other)
        assert list(complaints(graph, f"hvdx.{room}.case", room)), room
    assert list(underscored("from hvdx.keras.fit.data import _shard_arrays")) == ["_shard_arrays"]


def test_no_modules_import_each_other(graph):
    assert circle_in(graph) == ()


def test_circle_is_found():
    graph = grimp.ImportGraph()
    for importer, imported in ("ab", "bc", "cd", "cb"):
        graph.add_import(importer=f"hvdx.{importer}", imported=f"hvdx.{imported}")
    assert circle_in(graph) == ("hvdx.c", "hvdx.b")


def test_no_packages_import_each_other(graph):
    packages = [module for module in rooms(graph) if graph.find_children(module)]
    assert {"hvdx.keras", "hvdx.keras.fit"} <= set(packages)
    assert {package: found for package in packages if (found := graph.nominate_cycle_breakers(package))} == {}


def test_contract_of_a_strategy_needs_nothing_that_measures(graph):
    found = graph.find_upstream_modules("hvdx.strategies.contract")
    assert {"hvdx.comm.interfaces", "hvdx.costs.types"} <= found
    assert not found & {"hvdx.costs.measure", "hvdx.costs.link", "socket", "mpi4py"}


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


def test_no_module_asks_for_the_class_of_a_strategy(graph):
    known = strategies()
    for module, room in rooms(graph).items():
        if room != "strategies":
            asked = types_asked_for(ast.parse(text_of(module)))
            assert [f"{module}:{line}: {name}" for name, line in asked if name in known] == []


def test_check_for_the_class_of_a_strategy_is_found():
    assert {"AllReduce", "Auto", "ParameterAveraging", "ParameterServer", "Threshold", "TrialExchange"} <= strategies()
    for code in (
        "isinstance(x, (int, hvdx.Threshold))",
        "isinstance(x, int | Threshold)",
        "type(x) is Threshold",
        "match x:\n case Threshold(tau=1): pass",
    ):
        assert "Threshold" in dict(types_asked_for(ast.parse(code))), code
