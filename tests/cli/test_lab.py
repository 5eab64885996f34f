"""`hvdx lab`: options and messages; and hosts, links and counters, if this machine supports them."""

# Tests: hvdx/cli/emulation/namespaces.py, hvdx/cli/emulation/switch.py

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvdx.cli import lab
from hvdx.cli.common.mpi_tools import Mpi
from hvdx.cli.common.processes import Outcome
from hvdx.cli.emulation import namespaces
from hvdx.cli.emulation.namespaces import obstacle
from hvdx.cli.emulation.switch import Shape, parse_burst, parse_rate
from hvdx.cli.main import main
from hvdx.errors import ConfigError
from tests.launch import ROOT, run_command

LAB = [sys.executable, "-m", "hvdx", "lab"]
OPEN_MPI = Mpi("Open MPI", "5.0.11", None, None, "/b/mpirun", "Open MPI", "5.0.11")
_REASON = obstacle()
needs_lab = pytest.mark.skipif(_REASON is not None, reason=f"no lab here: {_REASON}")


# --- options and messages


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100mbit", 10**8), ("1gbit", 10**9), ("1.5Gbit", 1_500_000_000), ("64kbit", 64_000), ("none", None)],
)
def test_rate_is_read_as_tc_reads_it(text, rate):
    assert parse_rate(text) == rate


# To tc, "mbps" means megabytes per second, which users may not expect.
@pytest.mark.parametrize("text", ["100mbps", "100m", "fast", "", "-1mbit", "0mbit", "1kbit", "1e9bit", "1000gbit"])
def test_rate_spelled_otherwise_is_an_error(text):
    with pytest.raises(ConfigError, match=rf"--bandwidth: expected .*got '{re.escape(text)}'.* Do: "):
        parse_rate(text)


@pytest.mark.parametrize("rate", [10**7, 10**8, 10**9])
def test_burst_is_small_enough_to_limit_small_messages(rate):
    shape = Shape(rate)
    assert 2 * 1514 <= shape.burst <= max(2 * 1514, rate / 8 / 1000)
    assert 1514 <= shape.segment < shape.burst


def test_burst_can_be_chosen():
    assert [parse_burst(text) for text in ("20kB", "1.5MB", "4000B")] == [20_000, 1_500_000, 4000]
    (rule,) = Shape(10**8, bucket=parse_burst("256kB")).at_switch()
    assert "burst 256000b" in rule
    for text in ("256", "1kB", "2GB", "-5kB", "many"):
        with pytest.raises(ConfigError, match=rf"--burst: expected .*got '{text}'.* Do: "):
            parse_burst(text)


def test_delay_rule_precedes_the_rate_rule():
    shape = Shape(10**8, delay=0.005)
    assert [rule.split(" rate")[0] for rule in shape.at_host()] == [
        "root handle 1: netem delay 5000us limit 200000",
        "parent 1: handle 10: tbf",
    ]
    assert len(shape.at_switch()) == 1
    assert Shape().at_host() == Shape().at_switch() == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-n", "0", "--", "true"], "-n: expected 1 to 250 hosts, got 0"),
        (["-n", "251", "--", "true"], "-n: expected 1 to 250 hosts, got 251"),
        (["--threads", "0", "--", "true"], "--threads: expected 1 or more, got 0"),
        (["--ranks-per-host", "0", "--", "true"], "--ranks-per-host: expected 1 or more"),
        (["--ranks-per-host", "2", "--check"], "1 with --check, got 2"),
        (["--latency", "-1", "--", "true"], "--latency: expected"),
        (["--timeout", "0", "--", "true"], "--timeout: expected"),
        (["--bandwidth", "100mbps", "--", "true"], "--bandwidth: expected"),
        (["--bandwidth", "none", "--burst", "20kB", "--", "true"], "--burst: expected a limited"),
        (["--json", "/no/such/folder/x.json", "--", "true"], "--json: expected"),
        (["--check", "--", "true"], "--check: expected no command, got true"),
        (["--check", "-n", "1"], "--check: expected 2 hosts"),
        ([], "expected a command to run, got none"),
        (["--", "--bandwith", "1gbit", "true"], "expected a command after the options, got --bandwith"),
    ],
)
def test_wrong_options_are_errors_before_anything_starts(words, told, capsys, monkeypatch):
    monkeypatch.setattr(lab, "find_mpi", lambda: pytest.fail("continued"))
    assert main(["lab", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Do: " in error


def test_other_mpi_is_an_error_that_names_open_mpi(capsys, monkeypatch):
    monkeypatch.setattr(
        lab, "find_mpi", lambda: Mpi(mpirun="/b/mpirun", launcher_vendor="MPICH", launcher_version="4.2")
    )
    assert main(["lab", "--", "true"]) == 2
    assert "expected the mpirun of Open MPI" in capsys.readouterr().err


def test_obstacle_is_one_line_and_exit_code_2(capsys, monkeypatch):
    monkeypatch.setattr(lab, "find_mpi", lambda: OPEN_MPI)
    monkeypatch.setattr(lab, "obstacle", lambda delay: "expected this, got that. Do: something")
    assert main(["lab", "--", "true"]) == 2
    assert capsys.readouterr().err == "hvdx: lab: expected this, got that. Do: something.\n"


def test_obstacle_names_missing_tools_and_their_package(monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool in ("ip", "tc") else f"/bin/{tool}")
    assert obstacle() == "expected the command ip, tc, found none. Do: apt install iproute2"


@pytest.mark.parametrize(
    ("code", "told"),
    [(1, "make namespaces"), (102, "modprobe veth"), (104, "modprobe sch_tbf"), (105, "leave out --latency")],
)
def test_obstacle_names_the_step_that_failed(code, told, monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr(namespaces, "run", lambda *_: Outcome(code, err="unshare failed: Operation not permitted\n"))
    text = obstacle(delay=True)
    assert told in text
    assert "Operation not permitted" in text
    assert "Do" in text


def test_user_without_root_gets_a_user_namespace(monkeypatch):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert "--user" in namespaces.enter()
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    assert "--user" not in namespaces.enter()


# --- emulated hosts

_GATHER = """
import os, socket, sys, time
from mpi4py import MPI
comm, each = MPI.COMM_WORLD, int(sys.argv[1])
counter = "/sys/class/net/eth0/statistics/tx_bytes"
out, into = bytearray(each), bytearray(each * comm.size)
comm.Barrier()
before, start = int(open(counter).read()), time.perf_counter()
comm.Allgather(out, into)
seconds = time.perf_counter() - start
comm.Barrier()
sent = int(open(counter).read()) - before
threads = os.environ["OMP_NUM_THREADS"]
print(f"rank {comm.rank} on {socket.gethostname()}: sent {sent}, {seconds} s, {threads} threads\\n", end="", flush=True)
"""


@needs_lab
def test_links_carry_an_allgather_at_the_requested_rate(tmp_path):
    each, file = 4_000_000, tmp_path / "links.json"
    options = ["-n", "2", "--bandwidth", "100mbit", "--threads", "3", "--json", str(file)]
    done = run_command([*LAB, *options, "--", sys.executable, "-c", _GATHER, str(each)], timeout=60)
    assert done.code == 0, done
    told = re.findall(r"rank (\d) on (\w+): sent (\d+), ([\d.]+) s, 3 threads", done.out)
    assert sorted((rank, host) for rank, host, _, _ in told) == [("0", "host1"), ("1", "host2")], done
    facts = json.loads(file.read_text())
    assert [link["host"] for link in facts["links"]] == ["host1", "host2"]
    for link in facts["links"]:
        assert link["sent"] == pytest.approx(each, rel=0.1)
        assert link["received"] == pytest.approx(each, rel=0.1)
        assert f"\n{link['host']} " in done.out
    for (
        _,
        _,
        sent,
        seconds,
    ) in told:  # measured by the rank; a busy machine may be slower than the rate, but none is faster
        assert int(sent) == pytest.approx(each, rel=0.1)
        assert 0.95 < float(seconds) / (8 * each / 1e8) < 4


@needs_lab
def test_check_measures_a_link():
    done = run_command([*LAB, "--check", "--bandwidth", "100mbit"], timeout=60)
    reached = re.search(r"bandwidth +([\d.]+) Mbit/s", done.out)
    assert reached, done
    assert 40 < float(reached[1]) < 102
    small = re.search(r"30 kB +([\d.]+) ms", done.out)
    assert float(small[1]) > 1.8, "30 kB passed as if there were no limit"


@needs_lab
def test_exit_code_is_that_of_the_job_and_hosts_have_several_ranks():
    script = 'echo "$(hostname) $OMPI_COMM_WORLD_LOCAL_RANK of $OMPI_COMM_WORLD_SIZE"; sleep 0.5; exit 7'
    done = run_command([*LAB, "--ranks-per-host", "2", "--", "sh", "-c", script], timeout=30)
    assert done.code == 7, done
    assert sorted(re.findall(r"host\d \d of \d", done.out)) == [f"host{h} {r} of 4" for h in (1, 2) for r in (0, 1)]


@needs_lab
def test_short_programs_end_on_many_hosts():
    done = run_command([*LAB, "-n", "9", "--", "hostname"], timeout=30)
    assert done.code == 0, done
    assert {f"host{i}" for i in range(1, 10)} <= set(done.out.split())


@needs_lab
def test_killed_rank_ends_the_job_and_is_named():
    program = (
        "import os, time; from mpi4py import MPI; comm = MPI.COMM_WORLD; comm.Barrier()\n"
        "if comm.rank == 1: print('at', time.time(), flush=True); os.kill(os.getpid(), 9)\n"
        "time.sleep(60)"
    )
    done = run_command([*LAB, "-n", "3", "--", sys.executable, "-c", program], timeout=50)
    ended = time.time()
    # If other ranks lose the connection before the launcher notices the death, they end the job themselves.
    if "Socket closed" not in done.out:
        assert done.code == 128 + signal.SIGKILL, done
        assert "rank 1" in done.out
        assert "host2" in done.out
    assert done.code not in (0, None), done
    assert ended - float(re.search(r"at ([\d.]+)", done.out)[1]) < 10


def _sleepers(word):
    """Return the ids of all processes on this machine with this word on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@contextmanager
def _sleeping_lab(word, log):
    """Start a lab that writes to `log`, and yield it once its two ranks sleep, each with `word` on its command line."""
    program = [sys.executable, "-c", "import time; time.sleep(60)", word]
    with open(log, "w") as file:  # not a pipe, which remaining processes would keep open
        command = [*LAB, "-n", "2", "--", *program]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            # If a shell runs the tests in the background, they ignore SIGINT, and child processes inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
    try:
        # In four network namespaces: the machine's (hvdx), the switch's (mpirun), and those of the two ranks.
        assert _wait_for(lambda: len({_network_of(pid) for pid in _sleepers(word)} - {None}) >= 4)
        yield process
    finally:
        process.kill()
        process.wait()


def _network_of(pid):
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def _interfaces():
    return sorted(os.listdir("/sys/class/net")), sorted(Path("/run/netns").glob("*"))


@needs_lab
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGKILL", -9)])
def test_nothing_stays_behind_when_the_lab_is_ended(name, code, tmp_path):
    before, word = _interfaces(), f"sleeper-{name}-{os.getpid()}"
    with _sleeping_lab(word, tmp_path / "log") as process:
        process.send_signal(getattr(signal, name))
        assert process.wait(20) == code
        assert _wait_for(lambda: not _sleepers(word), 10), "processes stayed behind"
    out = (tmp_path / "log").read_text()
    assert ("link of" in out) == (name != "SIGKILL"), out
    assert _interfaces() == before


@needs_lab
def test_time_limit_ends_the_job():
    done = run_command([*LAB, "--timeout", "1.5", "--", "sleep", "100"], timeout=30)
    assert done.code == 124
    assert "time limit of 1.5 s reached" in done.out


@needs_lab
def test_two_labs_at_once_are_separate(tmp_path):
    word = f"sleeper-other-{os.getpid()}"
    with _sleeping_lab(word, tmp_path / "log") as other:
        done = run_command([*LAB, "--", sys.executable, "-c", _GATHER, "100000"], timeout=40)
        assert done.code == 0, done
        assert done.out.count("rank ") == 2
        assert other.poll() is None
        assert len(_sleepers(word)) >= 4, "one lab ended ranks of the other"


@needs_lab
@pytest.mark.skipif(os.geteuid() != 0, reason="a user's labs run in user namespaces in all tests above")
def test_lab_in_a_user_namespace():
    pretend = "import os, sys; os.geteuid = lambda: 1000\nfrom hvdx.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    gather = ["lab", "--bandwidth", "100mbit", "--", sys.executable, "-c", _GATHER, "100000"]
    done = run_command([sys.executable, "-c", pretend, *gather], timeout=40)
    if "expected to m" in done.out:
        pytest.skip(done.out.strip())
    assert done.code == 0, done
    assert done.out.count("rank ") == 2
