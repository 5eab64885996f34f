"""How soon a job goes on after a host is lost: `hvdx run --hosts --max-restarts` on emulated hosts with a sshd on each.

    python jobs/benchmarks/lost_host.py          # a link is cut, a host is stopped: some two minutes

Three hosts of the lab train one worker each, with a checkpoint every second. Then the link of the second one is cut, or
all of its processes are stopped, its sshd too; nothing of it answers, and nothing says so. The seconds are those from
then to the line that names the host, and to the first step of the next attempt, which has the two other hosts; beside
them those of the first attempt from its beginning to its first step. It takes root, and the sshd of OpenSSH.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hvdx.cli.common.processes import kill_group, start_group
from hvdx.cli.emulation import namespaces, switch
from hvdx.comm.waiting import until
from hvdx.jobs.benchmarks import harness
from hvdx.jobs.benchmarks.harness import Row, figure

WAYS = "cut link", "stopped host"
#: Seconds until the others know of it, and until they train again, beside those of a start.
KNOWN, AGAIN = 10.0, 30.0
_HOSTS, _LOST = ("host1", "host2", "host3"), 2
# Steps after which the host is lost, and after which the next attempt has shown that it trains.
_BEFORE, _AFTER = 200, 20
_PAUSE = 0.02
_LIMIT = 240.0
_SSHD = """Port 22
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
StrictModes no
SetEnv PATH={path} PYTHONPATH={modules}
"""
_SSH = """Host *
IdentityFile {folder}/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; in the lab, one of its jobs, or a worker of a job."""
    parser = harness.parser(__doc__)
    parser.add_argument("--inside", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--train", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.train:
        return _train(Path(options.train))
    if options.inside:
        return _lose(options.inside, options.json)
    if os.geteuid() or shutil.which("sshd", path="/usr/sbin:/usr/bin") is None:
        print("lost_host: expected root, and sshd. Do: apt install openssh-server", file=sys.stderr)
        return 1
    rows = harness.run_cases(
        options.json,
        ({"way": way} for way in WAYS),
        _measure,
        [
            ("lost by", lambda row: row["way"]),
            figure("known after, s", "known", ".1f"),
            figure("next step after, s", "again", ".1f"),
            figure("a start takes, s", "start", ".1f"),
            ("workers", lambda row: f"{row['before']} to {row['after']}"),
        ],
    )
    met = all(row["known"] <= KNOWN and row["again"] <= AGAIN + row["start"] for row in rows)
    print(f"the goals are {KNOWN:g} s, and {AGAIN:g} s beside those of a start: {'met' if met else 'missed'}")
    return 0 if met else 1


def _measure(case: Row) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [*namespaces.enter(), sys.executable, __file__, "--inside", case["way"], "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT + 60, check=False)
        if done.returncode:
            sys.exit(f"{case['way']}: the job failed:\n{done.stdout}{done.stderr}")
        (row,) = harness.finished(str(path))
        return row


# -- in the lab -------------------------------------------------------------------------------------------------------


def _lose(way: str, path: str) -> int:
    """Train on all hosts, lose one, and write the figures."""
    hosts = switch.build(len(_HOSTS), switch.Shape())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _serve_ssh(folder, hosts)
        steps, said = folder / "steps", list[tuple[float, str]]()
        where = ",".join(f"{host}:1" for host in _HOSTS)
        options = ["--hosts", where, "--checkpoint", str(folder / "checkpoints"), "--every", "50 steps"]
        command = [sys.executable, "-m", "hvdx", "run", *options, "--max-restarts", "3"]
        environ = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
        began = time.monotonic()
        job = start_group([*command, sys.executable, __file__, "--train", str(steps)], environ, merged=True)
        reader = threading.Thread(target=_read, args=(job, said), daemon=True)
        reader.start()
        try:
            first = _await(lambda: _steps(steps, 3), _BEFORE, job, said)
            lost = time.monotonic()
            _cut() if way == WAYS[0] else _stop(hosts[_LOST - 1])
            later = _await(lambda: _steps(steps, 2), _AFTER, job, said)
        finally:
            kill_group(job)
        known = next(at for at, line in said if re.search(rf"host {_HOSTS[_LOST - 1]} is lost", line))
        figures = {
            "way": way, "known": known - lost, "again": later[0] - lost, "start": first[0] - began, "before": 3,
            "after": 2,
        }  # fmt: skip
        harness.write(path, {"rows": [figures]})
    return 0


def _serve_ssh(folder: Path, hosts: list[switch.Host]) -> None:
    """Start a sshd on each host, and make a ssh for this process that reaches them."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    modules = os.environ.get("PYTHONPATH", "")
    (folder / "sshd_config").write_text(_SSHD.format(folder=folder, path=os.environ["PATH"], modules=modules))
    (folder / "ssh_config").write_text(_SSH.format(folder=folder))
    (folder / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/ssh_config "$@"\n')
    (folder / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    agent = switch.agent(hosts)
    for host in hosts:
        subprocess.run([agent, host.name, f"/usr/sbin/sshd -f {folder}/sshd_config"], check=True)


def _cut() -> None:
    subprocess.run(["ip", "link", "set", f"port{_LOST}", "down"], check=True)


def _stop(host: switch.Host) -> None:
    """Stop all processes on a host."""
    place = os.readlink(f"/proc/{host.keeper.pid}/ns/net")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "ns" / "net") == place:
                os.kill(int(process.name), signal.SIGSTOP)


def _read(job: "subprocess.Popen[str]", said: list[tuple[float, str]]) -> None:
    assert job.stdout is not None
    for line in job.stdout:
        said.append((time.monotonic(), line))


def _steps(path: Path, workers: int) -> list[float]:
    """Return the times of the steps with a number of workers."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [float(line.split()[1]) for line in lines if line.startswith(f"{workers} ")]


def _await(
    times: Callable[[], list[float]], count: int, job: "subprocess.Popen[str]", said: list[tuple[float, str]]
) -> list[float]:
    until(lambda: len(times()) >= count or job.poll() is not None, _LIMIT / 2)
    if len(found := times()) < count:
        sys.exit(f"expected {count} steps, got {len(found)}:\n{''.join(line for _, line in said)}")
    return found


def _train(path: Path) -> int:
    """Train on one worker; rank 0 writes the time of each step."""
    import keras
    import numpy as np

    import hvdx
    import hvdx.keras

    hvdx.init(seed=0)
    x, y = np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32), np.arange(4096) % 10
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
    model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    class Writer(keras.callbacks.Callback):
        """Write the time of each step on rank 0, after a pause."""

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            """Write a line."""
            time.sleep(_PAUSE)
            if hvdx.rank() == 0:
                with path.open("a") as file:
                    file.write(f"{hvdx.size()} {time.monotonic()}\n")

    data = hvdx.shard((x, y), 8)
    model.fit(data, epochs=1000, verbose=0, callbacks=[hvdx.keras.Distribute(), Writer()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
