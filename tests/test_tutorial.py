"""docs/tutorial.md shows a script that trains, stops and resumes as the page says, and so does its notebook."""

import importlib.util
import json
import re
import subprocess

import pytest

from tests.launch import ROOT, run

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
LOSSES = r" - loss: ([\d.]+) - .*val_accuracy: ([\d.]+)"


@pytest.fixture
def notebook():
    spec = importlib.util.spec_from_file_location("notebook", ROOT / "docs" / "notebook.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return json.loads(json.dumps(module.notebook_of(PAGE, "train.py")))


def cells_of(notebook, header):
    """Return the code of the cells that begin with a line."""
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [source.removeprefix(f"{header}\n") for source in sources if source.startswith(f"{header}\n")]


def blocks_of(language):
    return [b.rstrip() for b in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]


def test_notebook_has_the_code_and_the_text_of_the_page(notebook):
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    for cell in notebook["cells"]:
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"id", "cell_type", "metadata", "source"} | code
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    (script,) = cells_of(notebook, "%%writefile train.py")
    assert [script] == blocks_of("python")
    compile(script, "train.py", "exec")
    commands = cells_of(notebook, "%%bash")
    assert commands == blocks_of("sh")
    for command in commands:
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0
    text = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    headings = [re.findall("^#+ .*", re.sub("(?s)```.*?```", "", page), re.MULTILINE) for page in (text, PAGE)]
    assert headings[0] == headings[1]
    assert ".md" not in text


@pytest.fixture
def script(notebook, tmp_path):
    pytest.importorskip("sklearn")
    (code,) = cells_of(notebook, "%%writefile train.py")
    assert len(code.splitlines()) <= 40
    path = tmp_path / "train.py"
    path.write_text(code.replace('"digits.keras"', repr(str(tmp_path / "digits.keras"))))
    return path


def test_resumed_training_has_the_losses_of_the_page(script, tmp_path):
    shown = [tuple(map(float, pair)) for pair in re.findall(f"Epoch [15]/5\n.*{LOSSES}", PAGE)]
    commands = re.findall(r"^```sh\n(.*)\n```", PAGE.partition("## Stop and resume")[2], re.MULTILINE)
    resume = "hvdx run -n {} --checkpoint ckpt python train.py"
    # What follows is what they do; a further one would find a checkpoint of the others.
    assert commands == [f"HVDX_LIMIT=epochs:2 {resume.format(2)}", resume.format(1)]
    env = {"HVDX_CHECKPOINT": str(tmp_path / "ckpt")}
    stopped = run(2, [str(script)], env=env | {"HVDX_LIMIT": "epochs:2"})
    assert stopped.code == 0, stopped
    assert "hvdx: HVDX_LIMIT=epochs:2: the fit ends after epoch 2." in stopped.out
    resumed = run(1, [str(script)], env=env)
    assert resumed.code == 0, resumed
    assert "hvdx: resuming after epoch 2" in resumed.out
    found = [tuple(map(float, pair)) for job in (stopped, resumed) for pair in re.findall(LOSSES, job.out)]
    # The other rank prints the losses of two epochs, too; the first and last line are those of the page.
    assert found[0] == pytest.approx(shown[0], rel=0.05)
    assert found[-1] == pytest.approx(shown[1], rel=0.05)
    assert (tmp_path / "digits.keras").exists()
