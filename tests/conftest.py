"""For all tests: a quick start, here and in the processes that tests start, and kernels that are compiled already."""

from tests.quick_start import sitecustomize  # noqa: F401

# Where tests call kernels; what goes through a codec loads them by itself.
_CALL_KERNELS = ("kernels", "codec", "strategies", "jobs")


def pytest_collection_finish(session):
    """Load the compiled kernels before a test compiles one."""
    if any(item.path.relative_to(session.config.rootpath / "tests").parts[0] in _CALL_KERNELS
           for item in session.items if item.path.is_relative_to(session.config.rootpath / "tests")):  # fmt: skip
        from hvdx.cache import kernels_folder
        from hvdx.kernels import cpu

        cpu.prepare(kernels_folder())
