"""Detection of the installed MPI, and command lines that start ranks."""

import pytest

from hvdx.cli.common import mpi_tools
from hvdx.cli.common.mpi_tools import Mpi, find_mpi, mpirun_command, recognise
from hvdx.errors import LaunchError

ANSWERS = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to": ("Open MPI", "5.0.11"),
    "/usr/bin/mpicc: Open MPI 4.1.4 (Language: C)": ("Open MPI", "4.1.4"),
    "Open MPI v5.0.11\n\nhttps://www.open-mpi.org/community/help/": ("Open MPI", "5.0.11"),
    "mpicc for MPICH version 4.2.1\ngcc version 12.2.0": ("MPICH", "4.2.1"),
    "HYDRA build details:\n    Version:           4.0.2\n    Release Date: ...": ("MPICH", "4.0.2"),
    "MPICH Version:      4.3.0\nMPICH Release date:": ("MPICH", "4.3.0"),
    "Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307": ("Intel MPI", "2021.9"),
    "mpicc for the Intel(R) MPI Library 2021.9 for Linux*": ("Intel MPI", "2021.9"),
    "cc (Debian 12.2.0-14) 12.2.0": ("", ""),
}


@pytest.mark.parametrize(("text", "expected"), ANSWERS.items(), ids=lambda value: str(value)[:20])
def test_recognise(text, expected):
    assert recognise(text) == expected


def test_open_mpi_command_has_its_options(monkeypatch):
    mpi = Mpi(mpirun="/opt/mpirun", launcher_vendor="Open MPI", launcher_version="5.0.11")
    monkeypatch.setattr(mpi_tools.os, "geteuid", lambda: 1000)
    command = mpirun_command(3, mpi)
    assert command == ["/opt/mpirun", "-n", "3", "--oversubscribe", "--bind-to", "none"]
    monkeypatch.setattr(mpi_tools.os, "geteuid", lambda: 0)
    assert mpirun_command(3, mpi) == [*command, "--allow-run-as-root"]


def test_hydra_command_has_no_options_of_open_mpi():
    mpi = Mpi(mpirun="/opt/mpirun", launcher_vendor="MPICH", launcher_version="4.2")
    assert mpirun_command(2, mpi) == ["/opt/mpirun", "-n", "2"]


def test_command_without_mpirun_says_what_to_do():
    with pytest.raises(LaunchError, match="pip install"):
        mpirun_command(2, Mpi())


def test_find_mpi_on_a_fake_path(tmp_path, monkeypatch):
    for name, text in (("mpicc", "mpicc for MPICH version 4.2.1"), ("mpirun", "mpirun (Open MPI) 4.1.4")):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\necho '{text}'\n")
        tool.chmod(0o755)
    monkeypatch.setattr(mpi_tools, "search_path", lambda: str(tmp_path))
    mpi = find_mpi()
    assert (mpi.vendor, mpi.version) == ("MPICH", "4.2.1")
    assert (mpi.launcher_vendor, mpi.launcher_version) == ("Open MPI", "4.1.4")
    assert mpi.mpicxx is None
    assert mpi.home == str(tmp_path.resolve().parent)
