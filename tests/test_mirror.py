"""The tests of a module are found by its name, or by a line `# Tests:` at the top of a test file.

`hvdx/keras/fit/data.py` is tested by `tests/keras/fit/test_data.py` and `tests/keras/fit/test_data_*.py`, and by test
files with a line `# Tests: hvdx/keras/fit/data.py`. A line may name several modules; a file may have several lines.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Modules without tests, and why.
WITHOUT = {
    "hvdx/__main__.py": "calls hvdx.cli.main",
    "hvdx/version.py": "holds a constant",
    "hvdx/keras/types.py": "holds types",
    "kernels/arrays.py": "holds types",
}
# Test files of these folders mirror no module: they test several in a job.
JOBS = {"tests", "tests/ranks", "tests/slurm"}
LINE = re.compile(r"^# Tests: (.+)$", re.MULTILINE)


def modules(root):
    """Return the paths of the modules of hvdx; those of `kernels` and `jobs` without the links in `hvdx`."""
    found = [path for top in ("hvdx", "kernels", "jobs") for path in (root / top).rglob("*.py")]
    return {str(path.relative_to(root)) for path in found if path.name != "__init__.py"}


def named_after(module, files):
    """Return those of some test files that are named after a module."""
    *folders, name = Path(module.removeprefix("hvdx/")).with_suffix("").parts
    own = re.compile(re.escape("/".join(["tests", *folders, f"test_{name}"])) + r"(_\w+)?\.py")
    return {file for file in files if own.fullmatch(file)}


def complaints(root, without):
    """Yield the modules of a project without tests, and the test files and lines that lead to no module."""
    known, named = modules(root), {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        lines = LINE.findall(path.read_text())
        named[str(path.relative_to(root))] = {module for line in lines for module in line.split(", ")}
    stated, mirrors = set().union(*named.values()), {module: named_after(module, named) for module in known}
    for module in sorted(known - without.keys() - stated):
        if not mirrors[module]:
            yield f"{module}: no test file is named after it, and none has a line `# Tests: {module}`"
    for module in sorted(without.keys() - known):
        yield f"{module}: expected a module without tests, there is no such module"
    for file, given in named.items():
        for module in sorted(given - known):
            yield f"{file}: `# Tests: {module}`: there is no such module"
        if not given and str(Path(file).parent) not in JOBS and not any(file in found for found in mirrors.values()):
            yield f"{file}: it is named after no module, and has no line `# Tests:`"


def test_each_module_has_tests_that_are_found_by_its_name():
    assert list(complaints(ROOT, WITHOUT)) == []


@pytest.mark.parametrize(
    ("path", "text", "without", "said"),
    [
        ("hvdx/comm/new.py", "", {}, "hvdx/comm/new.py: no test file is named after it"),
        ("hvdx/comm/new.py", "", {"hvdx/comm/new.py": "types"}, None),
        ("tests/comm/test_mesh_faults.py", "", {}, None),
        ("tests/comm/test_meshes.py", "", {}, "tests/comm/test_meshes.py: it is named after no module"),
        ("tests/comm/test_meshes.py", "# Tests: hvdx/comm/mesh.py, kernels/cpu.py\n", {}, None),
        (
            "tests/ranks/test_all.py",
            "# Tests: hvdx/old.py\n",
            {},
            "tests/ranks/test_all.py: `# Tests: hvdx/old.py`: there",
        ),
        ("tests/test_all.py", "", {"hvdx/old.py": "types"}, "hvdx/old.py: expected a module without tests"),
    ],
)
def test_rule_can_fail(path, text, without, said, tmp_path):
    for file in ("hvdx/comm/mesh.py", "kernels/cpu.py", "tests/comm/test_mesh.py", "tests/kernels/test_cpu.py", path):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    (tmp_path / path).write_text(text)
    found = list(complaints(tmp_path, without))
    assert len(found) == (said is not None)
    assert said is None or found[0].startswith(said)
