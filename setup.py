"""Maps the folders of the repository to packages; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

# `kernels/` and `jobs/` stand at the top of the repository, where people look for them,
# and are installed inside `hvdx`, so that nothing else lands in site-packages.
FOLDERS = {"hvdx": "hvdx", "hvdx.kernels": "kernels", "hvdx.jobs": "jobs"}


def packages() -> list[str]:
    """List every package of every mapped folder."""
    found = []
    for package, folder in FOLDERS.items():
        found += [package, *(f"{package}.{sub}" for sub in find_packages(folder))]
    return found


setup(packages=packages(), package_dir=FOLDERS)
