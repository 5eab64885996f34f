"""Lets Keras start without scikit-learn, which it imports wherever it is installed: a third of its start-up time.

Processes of the tests have this folder on PYTHONPATH; `tests/conftest.py` imports it for pytest's own.
"""

import sys


class _NotForKeras:
    """Hides scikit-learn from Keras' wrappers alone: a job that imports it later finds it."""

    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1) if name == "sklearn" else None
        while frame is not None:
            if str(frame.f_globals.get("__name__")).startswith("keras.src.wrappers"):
                raise ModuleNotFoundError("hidden from Keras by hvdx' tests", name=name)
            frame = frame.f_back


sys.meta_path.insert(0, _NotForKeras())
