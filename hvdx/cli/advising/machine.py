"""Speeds of this machine and of the link, measured in processes of their own.

    python -m hvdx.cli.advising.machine speeds ELEMENTS    prints the speeds of this machine
    python -m hvdx.cli.advising.machine link ELEMENTS      on several ranks: rank 0 prints the link between them

A process of its own leaves the cores to the measurement; as many of them as workers share a host measure at once.
"""

import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvdx.cli.batch import systems
from hvdx.cli.common.mpi_tools import find_mpi, host_options, mpirun_command
from hvdx.cli.common.mpi_traffic import HOSTFILE
from hvdx.cli.common.processes import child_environment, key_line, kill_group, parse_reports, run, start_group
from hvdx.costs.types import Codec, Link, Machine
from hvdx.errors import LaunchError

_MODULE = [sys.executable, "-m", "hvdx.cli.advising.machine"]
# Measurements of the link, of which the fastest counts.
_PROBES = 3
# Largest expected time of an all-reduce on the link, in seconds.
_REDUCING_SECONDS = 4.0
# Seconds for a measurement; most of them are for compiling the codec's kernels, once on a machine.
_SPEEDS_SECONDS, _LINK_SECONDS = 90.0, 60.0


def measure(elements: int, copies: int = 1) -> Machine:
    """Measure this machine with as many processes at once as workers share it; return the medians.

    Raises:
        LaunchError: if a process fails.
    """
    environ = child_environment()
    if copies > 1:
        environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // copies)))
    end = time.monotonic() + _SPEEDS_SECONDS
    started: list[subprocess.Popen[str]] = []
    found: list[dict[str, Any]] = []
    try:
        for _ in range(copies):
            started.append(start_group([*_MODULE, "speeds", str(elements)], environ, merged=True))
        for process in started:
            try:
                out, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                out = "no answer within the time limit"
            reports = parse_reports(out)
            if not reports:
                raise LaunchError(f"advise: the speed of this machine: {key_line(out)}. Do: hvdx build-kernels")
            found.append(reports[0])
    finally:
        for process in started:
            kill_group(process)
            process.wait()
    return machine_of({name: statistics.median(each[name] for each in found) for name in found[0]})


def machine_of(speeds: Mapping[str, float]) -> Machine:
    """Return the machine with the speeds of `as_speeds`."""
    # Files of older benchmarks lack some speeds.
    coding = {f.name: speeds[f.name] for f in dataclasses.fields(Codec) if f.name in speeds}
    plain = {f.name: speeds[f.name] for f in dataclasses.fields(Machine) if f.name != "codec"}
    return Machine(**plain, codec=Codec(**coding))


def as_speeds(machine: Machine) -> dict[str, float]:
    """Return the speeds of a machine by name.

    Example:
        >>> machine_of(as_speeds(Machine())) == Machine()
        True
    """
    speeds = dataclasses.asdict(machine)
    return speeds | speeds.pop("codec")


def link_command(elements: int) -> list[str]:
    """Return the command of each rank that measures the link."""
    return [*_MODULE, "link", str(elements)]


class Probed(NamedTuple):
    """Link and speeds of several hosts.

    Attributes:
        link: link between the hosts.
        seconds: name of each host, and seconds of the same arithmetic there.
    """

    link: Link
    seconds: Sequence[tuple[str, float]] = ()


def probe(hosts: Sequence[str], elements: int) -> Probed:
    """Measure the link between hosts and their speeds, with one rank on each.

    Args:
        hosts: names of the hosts; empty for those of this batch job.

    Raises:
        LaunchError: if the ranks cannot be started, or do not measure the link in time.
    """
    if hosts:
        command = [sys.executable, "-m", "hvdx", "run", "--hosts", ",".join(f"{host}:1" for host in hosts)]
    else:
        mpi = find_mpi()
        command = [*mpirun_command(job_size(), mpi), *host_options(mpi, 1, _hostfile())]
    done = run([*command, *link_command(elements)], _LINK_SECONDS)
    reports = parse_reports(done.out)
    if not reports:
        raise LaunchError(
            f"advise: the link could not be measured: {done.reason()}. Give its speed instead: --bandwidth 1gbit"
        )
    return Probed(Link(**reports[0]["link"]), [(name, seconds) for name, seconds in reports[0]["seconds"]])


def job_size() -> int:
    """Return the number of hosts of this batch job; 1 outside of a batch job."""
    return max(systems.hosts_of_job(name) for name in ("Slurm", *HOSTFILE))


def _hostfile() -> str:
    return next((os.environ[name] for name in HOSTFILE.values() if os.environ.get(name)), "")


def _main(words: Sequence[str]) -> None:
    from hvdx.costs import link
    from hvdx.costs.measure import measure_arithmetic, measure_machine
    from hvdx.costs.model import Situation

    if words[0] == "speeds":
        print("HVDX", json.dumps(as_speeds(measure_machine(int(words[1])))))
        return
    from hvdx import comm
    from hvdx.comm import mpi

    world = comm.start()
    channel = world.channel("the link")
    # Other traffic and lost packets make a measurement slower, never faster.
    found = max((link.probe(channel) for _ in range(_PROBES)), key=lambda each: each.bandwidth)
    if world.size > 1:
        # Not the whole model on a slow link, and the same number on all ranks, because the link is.
        bytes_in_time = _REDUCING_SECONDS * found.bandwidth * world.size / (2 * (world.size - 1))
        elements = max(1, min(int(words[1]), int(bytes_in_time / 4)))
        ideal = Situation(world.size, (elements,), 0.0, found).ring(4 * elements)
        spent = mpi.all_reduce_seconds(elements) - ideal["latency"]
        found = dataclasses.replace(found, reducing=min(1.0, ideal["transfer"] / max(spent, 1e-9)))
    seconds = world.all_gather_object((socket.gethostname(), measure_arithmetic()), "the speeds of the hosts")
    if world.rank == 0:
        print("HVDX", json.dumps({"link": dataclasses.asdict(found), "seconds": seconds}), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
