"""Emulated hosts on one switch, each a network namespace with one shaped link. Runs inside the lab's namespaces.

    host1 eth0 ---- port1 |
    host2 eth0 ---- port2 | eth0, the switch: a bridge in the lab's own network namespace, where mpirun runs
    host3 eth0 ---- port3 |

A host is a waiting process (its keeper) in its own namespaces for network, host name and mounts. No namespace is
bound to a file, so all disappear when their last process ends.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hvdx.errors import ConfigError, LaunchError

# Accepted ratios of measured to requested rate. Headers of Ethernet, IP and TCP take 5 %.
_LOW, _HIGH = 0.85, 1.02
_LATE = 0.01  # seconds of accepted extra latency; the machine's own is about 0.05 ms, more if its cores are busy

_PROGRAM = f"""
import sys, time
from mpi4py import MPI

rate, delay = float(sys.argv[1]), float(sys.argv[2])
comm = MPI.COMM_WORLD
rank = comm.Get_rank()


def seconds(sizes, there, back):
    # Median time from rank 0's send to the answer of rank 1.
    out, home, taken = bytearray(there), bytearray(back), []
    for _ in range(sizes):
        start = time.perf_counter()
        if rank == 0:
            comm.Send(out, 1)
            comm.Recv(home, 1)
        elif rank == 1:
            comm.Recv(out, 0)
            comm.Send(home, 0)
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2]


seconds(20, 8, 8)
ping = seconds(200 if not delay else 20, 8, 8) / 2
amount = int(min(max(rate / 8, 100_000), 250_000_000)) if rate else 250_000_000
stream = seconds(3, amount, 8)
small = seconds(9, 30_000, 8)
code = 0
if rank == 0:
    reached = 8 * amount / stream
    print(f"latency     {{ping * 1e3:.3f}} ms, half a round trip of 8 bytes; requested: {{delay * 1e3:g}} ms added")
    asked = f"{{reached / rate:.0%}} of the requested {{rate / 1e6:g}} Mbit/s" if rate else "no limit requested"
    print(f"bandwidth   {{reached / 1e6:.1f}} Mbit/s, {{amount / 1e6:g}} MB from host1 to host2; {{asked}}")
    ideal = f"; {{240_000 / rate * 1e3 + 2 * ping * 1e3:.3f}} ms at that rate" if rate else ""
    print(f"30 kB       {{small * 1e3:.3f}} ms there and 8 bytes back{{ideal}}")
    if rate and not {_LOW} <= reached / rate <= {_HIGH}:
        print("The rate differs from the requested one: the machine is too slow for it, or too busy.")
        code = 1
    if not delay <= ping <= delay + {_LATE}:
        print("The latency differs from the requested one: the machine is too busy.")
        code = 1
sys.exit(comm.bcast(code))
"""


def check_command(rate: int | None, delay: float) -> list[str]:
    """Return the command of each rank. Ranks 0 and 1 measure; the others wait.

    Args:
        rate: requested bits per second; None for no limit.
        delay: requested seconds of added latency.
    """
    return [sys.executable, "-c", _PROGRAM, str(rate or 0), str(delay)]


MAX_HOSTS = 250
SUBNET = "10.77.0.0/24"
#: Mount point of a memory file system on each host: hosts share no memory, and MPI's files disappear with them.
SCRATCH = Path("/dev/shm")
_FRAME = 1514  # bytes of a full Ethernet frame

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}
_LARGEST_BURST = 10**9
_SLOWEST, _FASTEST = 8_000, 100_000_000_000  # bits per second; TCP fails below 8 kbit/s

# Arguments: name of the host, address, segment in bytes, then one string of words after `tc qdisc add dev eth0` for
# each rule. It prints "ready", waits until its link exists, prints "ready" again, and stays until its input ends.
_KEEPER = """
set -e
hostname "$1"
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6 2>/dev/null || :
echo ready
read -r go
ip link set lo up
ip addr add "$2/24" dev eth0
ip link set eth0 up gso_max_size "$3"
shift 3
for qdisc in "$@"; do tc qdisc add dev eth0 $qdisc; done
echo ready
read -r go || :
"""


@dataclass(frozen=True)
class Shape:
    """Rate and delay of every link, in each direction.

    Attributes:
        rate: bits per second; None for no limit.
        delay: seconds from one host to another, added to the machine's own latency.
        bucket: bytes that may pass at once after a pause; None for `burst`'s default.
    """

    rate: int | None = None
    delay: float = 0.0
    bucket: int | None = None

    @property
    def burst(self) -> int:
        """Bytes that may pass at once after a pause; by default 0.4 ms of the rate, at least two frames.

        With a smaller burst, late timers cost rate; with a larger one, small messages pass as if there were no limit.
        """
        return self.bucket or max(2 * _FRAME, int((self.rate or 0) / 8 * 0.4e-3))

    @property
    def segment(self) -> int:
        """Largest segment in bytes that TCP may pass to the interface.

        tbf splits segments above the burst into frames, which cost a quarter of the rate at 1 Gbit/s.
        """
        return min(65_536, int(0.9 * self.burst)) if self.rate else 65_536

    def at_switch(self) -> list[str]:
        """Return the words after `tc qdisc add dev PORT` for the end of a link at the switch."""
        # Up to 100 ms of the rate may wait; further frames are dropped, as in a switch.
        return [f"root tbf rate {self.rate}bit burst {self.burst}b latency 100ms"] if self.rate else []

    def at_host(self) -> list[str]:
        """Return the words for the end of a link at the host, which adds the delay."""
        if not self.delay:
            return self.at_switch()
        # Room for all packets in flight: netem's default limit of 1000 would drop some at 10 ms and 1 Gbit/s.
        rules = [f"root handle 1: netem delay {self.delay * 1e6:.0f}us limit 200000"]
        return rules + [rule.replace("root", "parent 1: handle 10:", 1) for rule in self.at_switch()]


@dataclass(frozen=True)
class Host:
    """One emulated host.

    Attributes:
        keeper: process that holds its namespaces.
    """

    name: str
    address: str
    keeper: "subprocess.Popen[str]"

    def counters(self) -> dict[str, int]:
        """Return the bytes that its link has sent and received, from the counters of its interface."""
        folder = Path(f"/proc/{self.keeper.pid}/root/sys/class/net/eth0/statistics")
        return {key: int((folder / name).read_text()) for key, name in (("sent", "tx_bytes"), ("received", "rx_bytes"))}


def parse_rate(text: str) -> int | None:
    """Parse a bandwidth in the spelling of tc.

    Args:
        text: a number with bit, kbit, mbit or gbit; or "none".

    Returns:
        Bits per second; None for "none".

    Raises:
        ConfigError: if it has another form, or is not between 8 kbit and 100 gbit.

    Example:
        >>> parse_rate("100mbit")
        100000000
    """
    if text == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.lower())
    rate = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not _SLOWEST <= rate <= _FASTEST:
        raise ConfigError(
            f"lab: --bandwidth: expected a rate such as 10mbit, 1.5gbit (8kbit to 100gbit), or none; got {text!r}. "
            "Do: --bandwidth 100mbit, which is 12.5 megabytes per second."
        )
    return rate


def parse_burst(text: str) -> int:
    """Parse the size of a burst.

    Args:
        text: a number of bytes with B, kB or MB.

    Returns:
        Bytes.

    Raises:
        ConfigError: if it has another form, or is not between two Ethernet frames and 1 GB.

    Example:
        >>> parse_burst("256kB")
        256000
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)b", text.lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not 2 * _FRAME <= size <= _LARGEST_BURST:
        raise ConfigError(
            f"lab: --burst: expected a size such as 20kB or 256kB ({2 * _FRAME}B to 1000MB), got {text!r}. "
            "Do: leave it out for 0.4 ms of the rate."
        )
    return size


def build(count: int, shape: Shape) -> list[Host]:
    """Make `count` hosts, the switch, and links of this `shape`, in the namespaces of this process.

    Raises:
        LaunchError: if a step fails; the message includes the tool's error.
    """
    _run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(SCRATCH)])
    hosts = [(f"host{i}", f"10.77.0.{i}") for i in range(1, count + 1)]
    _name_hosts(hosts)
    made = [Host(name, address, _keeper(name, address, shape)) for name, address in hosts]
    for host in made:
        _await_ready(host)
    _connect(made, shape)
    for host in made:
        _line_of(host.keeper.stdin).write("go\n")
        _line_of(host.keeper.stdin).flush()
    for host in made:
        _await_ready(host)
    return made


def agent(hosts: Sequence[Host]) -> Path:
    """Write the script that mpirun calls instead of ssh: `agent HOST COMMAND...` runs the command on that host."""
    cases = "\n".join(f"{host.name}) keeper={host.keeper.pid} ;;" for host in hosts)
    text = (
        f'#!/bin/sh\ncase "$1" in\n{cases}\n*) echo "no such host in the lab: $1" >&2; exit 1 ;;\nesac\nshift\n'
        # Like ssh, join the words and let a shell parse them again.
        'exec nsenter --target "$keeper" --net --uts --mount --wd="$PWD" sh -c "$*"\n'
    )
    path = SCRATCH / "hvdx-lab-agent"
    # Also on the hosts: Open MPI 4 checks that it exists there, though it calls it only here.
    for root in ("/", *(f"/proc/{host.keeper.pid}/root" for host in hosts)):
        copy = Path(f"{root}{path}")
        copy.write_text(text)
        copy.chmod(0o755)
    return path


def _name_hosts(hosts: Sequence[tuple[str, str]]) -> None:
    """Mount an /etc/hosts with the names of all hosts, visible only inside the lab."""
    path = SCRATCH / "hvdx-lab-hosts"
    path.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in hosts))
    path.chmod(0o644)
    _run(["mount", "--bind", str(path), "/etc/hosts"])


def _keeper(name: str, address: str, shape: Shape) -> "subprocess.Popen[str]":
    words = ["unshare", "--net", "--uts", "--mount", "sh", "-c", _KEEPER, "sh", name, address, str(shape.segment)]
    pipe = subprocess.PIPE
    # In a session of its own, so that a terminal's Ctrl-C does not reach it.
    return subprocess.Popen(
        [*words, *shape.at_host()], stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def _await_ready(host: Host) -> None:
    if _line_of(host.keeper.stdout).readline() != "ready\n":
        said = _line_of(host.keeper.stderr).read().strip()
        raise LaunchError(f"lab: {host.name} could not be set up: {said}. Do: hvdx lab --check")


def _connect(hosts: Sequence[Host], shape: Shape) -> None:
    """Make the switch, and connect each host to it."""
    for which in ("all", "default"):  # IPv6's own packets on the links would be counted
        path = Path(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6")
        if os.access(path, os.W_OK):
            path.write_text("1")
    links = ["link set lo up", "link add eth0 type bridge mcast_snooping 0", "addr add 10.77.0.254/24 dev eth0"]
    links.append("link set eth0 up")
    rules = []
    for i, host in enumerate(hosts, 1):
        links.append(f"link add port{i} type veth peer name eth0 netns {host.keeper.pid}")
        links.append(f"link set port{i} master eth0 up")
        rules += [f"qdisc add dev port{i} {rule}" for rule in shape.at_switch()]
    _run(["ip", "-batch", "-"], "\n".join(links))
    if rules:
        _run(["tc", "-batch", "-"], "\n".join(rules))


def _run(command: Sequence[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"lab: {command[0]} failed: {done.stderr.strip()}. Do: hvdx lab --check")


def _line_of(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
