"""Options that keep the traffic of ranks off other networks."""

import socket
import subprocess
import sys

import pytest

from hvdx.cli.common import mpi_traffic
from hvdx.cli.common.mpi_tools import Mpi
from hvdx.cli.common.mpi_traffic import traffic_options

OPEN_MPI = Mpi("Open MPI", "5.0.11", mpirun="/opt/mpirun", launcher_vendor="Open MPI")
ALONE = ["--mca", "btl", "^tcp"]
ADDRESSES = {"near": "10.1.2.3", "far": "192.0.2.7", "wide": "10.9.0.1", "me": "127.0.1.1"}
# Networks 10.0.0.0/8 and 10.1.2.0/24 on two interfaces; a network and the default behind a gateway.
ROWS = [
    ("eth0", "10.0.0.0", "0.0.0.0", "0001", "255.0.0.0"),
    ("ib0", "10.1.2.0", "0.0.0.0", "0001", "255.255.255.0"),
    ("eth0", "192.0.2.0", "10.0.0.1", "0003", "255.255.255.0"),
    ("eth0", "0.0.0.0", "10.0.0.1", "0003", "0.0.0.0"),
]


@pytest.fixture
def routes(tmp_path, monkeypatch):
    """Give this host the networks of ROWS, and names the addresses of ADDRESSES."""

    def word(address):
        return f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}"

    lines = [f"{i}\t{word(to)}\t{word(by)}\t{flags}\t0\t0\t0\t{word(mask)}\t0\t0\t0" for i, to, by, flags, mask in ROWS]
    path = tmp_path / "route"
    path.write_text("\n".join(["Iface\tDestination\t...", *lines, ""]))
    monkeypatch.setattr(mpi_traffic, "_ROUTES", path)

    monkeypatch.setattr(mpi_traffic, "is_this_machine", lambda host: host in ("localhost", "127.0.0.1"))

    def find(name):
        if name not in ADDRESSES:
            raise socket.gaierror(name)
        return ADDRESSES[name]

    monkeypatch.setattr(socket, "gethostbyname", find)


@pytest.mark.parametrize(
    ("hosts", "environ", "expected"),
    [
        ([], {}, ALONE),
        ([], {"OMPI_MCA_btl_tcp_flags": "send"}, ALONE),
        ([], {"OMPI_MCA_btl": "self,tcp"}, []),
        ([], {"SLURM_JOB_ID": "7"}, []),
        ([], {"PRTE_MCA_prte_default_hostfile": "hosts"}, []),
        (["near", "me"], {}, ["--mca", "btl_tcp_if_include", "10.1.2.0/24"]),
        (["near", "wide"], {"SLURM_JOB_ID": "7"}, ["--mca", "btl_tcp_if_include", "10.0.0.0/8"]),
        (["near", "wide"], {"OMPI_MCA_btl_tcp_if_exclude": "eth0"}, []),
        (["near", "far"], {}, []),
        (["near", "only-ssh"], {}, []),
        (["localhost", "127.0.0.1"], {}, ALONE),
        (["localhost"], {"SLURM_JOB_ID": "7"}, ALONE),
    ],
)
def test_options_by_hosts_and_environment(routes, hosts, environ, expected):
    assert traffic_options(OPEN_MPI, hosts, environ) == expected


def test_files_of_parameters_count_as_choices(tmp_path):
    own = Mpi("Open MPI", "5.0.11", mpirun=str(tmp_path / "bin" / "mpirun"), launcher_vendor="Open MPI")
    assert traffic_options(own, [], {}) == ALONE
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "openmpi-mca-params.conf").write_text("# the site's\nbtl_tcp_if_exclude = lo,docker0\n")
    assert traffic_options(own, [], {}) == []


def test_file_of_the_distribution_is_that_of_its_own_mpirun(tmp_path, monkeypatch):
    (tmp_path / "mca.conf").write_text("btl = ^openib\n")
    monkeypatch.setitem(mpi_traffic._SITES_FILE, True, tmp_path / "mca.conf")
    for mpirun, options in (("/usr/bin/mpirun", []), (str(tmp_path / "bin" / "mpirun"), ALONE)):
        own = Mpi("Open MPI", "5.0.11", mpirun=mpirun, launcher_vendor="Open MPI")
        assert traffic_options(own, [], {}) == options


def test_other_vendors_get_no_options():
    assert traffic_options(Mpi("MPICH", "4.2", launcher_vendor="MPICH"), [], {}) == []


LISTENING = """
import os, sys
from mpi4py import MPI

MPI.COMM_WORLD.allreduce(1)
folder = "/proc/self/fd"
mine = [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder) if os.path.lexists(f"{folder}/{fd}")]
rows = [line.split() for kind in ("tcp", "tcp6") for line in open(f"/proc/self/net/{kind}")]
found = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
print("listens on", found, flush=True)
sys.exit(7 + len(found))
"""


def test_ranks_on_one_host_listen_nowhere_and_end_with_their_code():
    words = [sys.executable, "-m", "hvdx", "run", "-n", "2", "--all", "python", "-c", LISTENING]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "listens on []\n" * 2, done
    assert done.returncode == 7  # the job's
