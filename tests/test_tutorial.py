"""docs/tutorial.md shows a script that trains, stops and resumes as the page says."""

import re

import pytest

from tests.launch import ROOT, run

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
LOSSES = r" - loss: ([\d.]+) - .*val_accuracy: ([\d.]+)"


@pytest.fixture
def script(tmp_path):
    pytest.importorskip("sklearn")
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(code.splitlines()) <= 40
    path = tmp_path / "train.py"
    path.write_text(code.replace('"digits.keras"', repr(str(tmp_path / "digits.keras"))))
    return path


def test_resumed_training_has_the_losses_of_the_page(script, tmp_path):
    shown = [tuple(map(float, pair)) for pair in re.findall(f"Epoch [15]/5\n.*{LOSSES}", PAGE)]
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
