"""Run a script as `python SCRIPT` does, and write what became of it for `tests/try_scripts.py`.

    python tests/observe.py FOLDER SCRIPT

Each rank writes to FOLDER: `rank-N.json` with the histories of its fits, or its error; `rank-N.npz` with the weights of
all models that the script leaves in its variables.
"""

import json
import runpy
import sys
from pathlib import Path

import keras
import numpy as np

from hvdx.comm import launcher


def main(folder: Path, script: str) -> None:
    """Run the script; write the files, also if it raises."""
    launch = launcher.detect()
    rank = launch.rank if launch is not None and launch.rank else 0
    histories = []
    fit = keras.Model.fit

    def observed(self, *arguments, **options):
        history = fit(self, *arguments, **options)
        histories.append(history.history)
        return history

    keras.Model.fit = observed
    error, left = None, {}
    sys.argv[:] = [script]
    try:
        left = runpy.run_path(script, run_name="__main__")
    except BaseException as raised:
        error = {"module": type(raised).__module__, "name": type(raised).__name__, "text": str(raised)}
        raise
    finally:
        models = {id(m): (name, m) for name, m in reversed(left.items()) if isinstance(m, keras.Model)}
        weights = [
            (f"{name}: {weight.path}", keras.ops.convert_to_numpy(weight).astype("float64"))
            for name, model in reversed(models.values())
            for weight in model.weights
        ]
        arrays = {f"{i} {name}": value for i, (name, value) in enumerate(weights)}
        np.savez(folder / f"rank-{rank}.npz", **arrays)
        written = json.dumps({"error": error, "histories": histories}, default=lambda value: np.asarray(value).tolist())
        (folder / f"rank-{rank}.json").write_text(written)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
