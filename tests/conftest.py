"""For all tests: a quick start, here and in the processes that tests start."""

from tests.quick_start import sitecustomize  # noqa: F401
