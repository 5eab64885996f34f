"""A Slurm cluster of three nodes on one machine, with its own controller, key and ports.

All its files are in one folder, so that several clusters can run at once, and beside a Slurm of the machine.
"""

import contextlib
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hvdx.cli.common.processes import Outcome, run, search_path

NODES = ("hvdx1", "hvdx2", "hvdx3")
#: Configured CPUs of each node, independent of the machine.
CPUS = 4
#: Final states of a job.
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "squeue", "sinfo")
_PROGRAMS += ("hostname", "mount", "setpriv", "unshare")
_START_LIMIT = 60.0  # seconds until all nodes are idle; it takes two on an idle machine
_STOP_LIMIT = 10.0  # seconds for the daemons to end
_COMMAND_LIMIT = 30.0  # seconds for one command
_POLL = 0.2  # seconds
_LONGEST_FOLDER = 70  # characters; the paths of its sockets may have 107

# cred_expire: seconds before a requeued job may start again (120 by default).
# CompleteWait: seconds for which jobs wait until one before them has left its nodes; otherwise they get other nodes.
# config_overrides: nodes have the CPUs of this file; otherwise Slurm would drain a node on a machine with fewer.
_SLURM_CONF = """\
ClusterName=hvdx
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,sched_min_interval=0,bf_interval=5
ReturnToService=1
MpiDefault=none
OverTimeLimit=0
KillWait=30
CompleteWait=5
MinJobAge=3600
MessageTimeout=30
SlurmdTimeout=300
{nodes}
PartitionName=main Nodes={names} Default=YES DefaultTime=10 MaxTime=60 State=UP
"""

# Each node has its own host name and shared memory. Otherwise Open MPI would assume that ranks of two nodes are on one
# host, and they would overwrite each other's shared memory. Each node also has its own processes, so that a test can
# kill a whole node. Files and network are those of the machine.
_NAMESPACES = ("unshare", "--mount", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child")
_NODE = """\
mount -t tmpfs tmpfs /dev/shm
mount --bind {hosts} /etc/hosts
hostname {node}
"$@"
exit
"""


class ClusterError(Exception):
    """Raised when the cluster, or a command on it, fails; the message ends with the logs."""


class Cluster:
    """Three nodes, `hvdx1` to `hvdx3`, of 4 CPUs each in the partition `main`.

    A job has the environment of its submitter; `environment` puts this Python's folder first on PATH.

    Args:
        folder: folder for configuration, state and logs; its path must be short.

    Example:
        >>> with Cluster(tmp_path) as cluster:  # doctest: +SKIP
        ...     cluster.run(["srun", "-N", "2", "-n", "2", "hostname"], timeout=30).code
        0
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Environment of commands: that of this process, with this cluster, and without the job of another Slurm."""
        kept = {name: value for name, value in os.environ.items() if not re.match("(SLURM|SBATCH|SRUN)_", name)}
        return kept | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": search_path(),
            # Otherwise PMIx looks for the system's munge, and prints a warning.
            "PMIX_MCA_psec": "native",
            # Jobs run as root, like the cluster.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    # --- commands

    def run(self, command: Sequence[str], timeout: float = _COMMAND_LIMIT, **more: str) -> Outcome:
        """Run a command as on the login node.

        Args:
            command: the program and its arguments.
            timeout: seconds until it is killed with its children; a submitted job continues.
            more: additional environment variables.
        """
        return run(list(command), timeout, self.environment | more)

    def ask(self, *command: str) -> str:
        """Run a Slurm command, and return its standard output.

        Raises:
            ClusterError: if it fails.
        """
        done = self.run(command)
        if done.code != 0:
            said = done.text.strip() or done.reason()
            raise ClusterError(f"{shlex.join(command)}: expected exit code 0, got {done.code}: {said}\n{self.logs()}")
        return done.out

    def sbatch(self, script: Path, *options: str) -> int:
        """Submit a script with options of sbatch, such as "-N2" or "--signal=B:USR1@30"; return the job's id."""
        answer = self.ask("sbatch", "--parsable", *options, str(script))
        return int(answer.split(";")[0])

    def show(self, job: int) -> dict[str, str]:
        """Return the fields of `scontrol show job` by name: JobState, Reason, Restarts, ExitCode, NodeList, ..."""
        return dict(
            pair.split("=", 1) for pair in self.ask("scontrol", "-o", "show", "job", str(job)).split() if "=" in pair
        )

    def state(self, job: int) -> str:
        """Return a job's state: PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, TIMEOUT, CANCELLED, NODE_FAIL, ..."""
        return self.show(job)["JobState"]

    def wait(self, job: int, states: str | Iterable[str] = ENDED, timeout: float = 60) -> str:
        """Wait until a job is in one of the states, and return its state.

        Args:
            job: id of the job.
            states: one name or several; by default all final states.
            timeout: seconds.

        Raises:
            ClusterError: if the time limit is reached.
        """
        wanted = (states,) if isinstance(states, str) else tuple(states)
        end = time.monotonic() + timeout
        while (state := self.state(job)) not in wanted:
            if time.monotonic() > end:
                raise ClusterError(
                    f"job {job}: expected {' or '.join(wanted)} within {timeout} s, got {self.show(job)}\n{self.logs()}"
                )
            time.sleep(_POLL)
        return state

    # --- nodes

    def node_state(self, name: str) -> str:
        """Return a node's state: idle, mixed, allocated, down, drained, ...; with a * if its slurmd does not answer."""
        return self.ask("sinfo", "-h", "-N", "-n", name, "-o", "%T").strip()

    def node_lost(self, name: str) -> None:
        """Make a node fail by killing all its processes, including slurmd.

        Slurm gets no message. It notices the failure after SlurmdTimeout, 300 s here and by default.
        """
        self._cut_power(name)

    def node_down(self, name: str) -> None:
        """Tell Slurm that a node is down, so that it requeues the batch jobs on it."""
        self.ask("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=test")

    def node_resume(self, name: str, timeout: float = 30) -> None:
        """Start a lost node again, and wait until Slurm can allocate it; `timeout` seconds apply to each of two waits.

        Raises:
            ClusterError: if a wait takes longer.
        """
        log = self.folder / f"{name}.log"
        before = log.read_text(errors="replace").count("slurmd started")
        self._start_node(name)
        # If a node is resumed before its slurmd answers, Slurm may ask it again only after half a minute.
        answers = f"the slurmd of {name} to start"
        self._until(lambda: log.read_text(errors="replace").count("slurmd started") > before, timeout, answers)
        self.ask("scontrol", "update", f"NodeName={name}", "State=RESUME")
        self._until(lambda: self.node_state(name) in ("idle", "mixed", "allocated"), timeout, f"{name} to be up")

    # --- start and end

    def __enter__(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def logs(self, lines: int = 15) -> str:
        """Return the last lines of each daemon's log."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            text = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"--- {path.name}", *text]))
        return "\n".join(parts)

    def _start(self) -> None:
        self._write_configuration()
        munge = self.folder / "munge"
        # --force: otherwise munged refuses a folder below one that other users can write to.
        self._daemon(
            "munged", "--foreground", "--force", f"--socket={munge}/socket", f"--key-file={munge}/key",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        self._until((munge / "socket").exists, _START_LIMIT, "munged to listen")
        self._daemon("slurmctld", "-D", "-c", "-f", str(self.folder / "slurm.conf"))
        for node in NODES:
            self._start_node(node)
        self._until(self._idle, _START_LIMIT, f"{', '.join(NODES)} to be idle")

    def _write_configuration(self) -> None:
        if len(str(self.folder)) > _LONGEST_FOLDER:
            raise ClusterError(f"folder: expected at most {_LONGEST_FOLDER} characters, got {self.folder}")
        (self.folder / "munge").mkdir(parents=True)
        (self.folder / "state").mkdir()
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        host, ports = socket.gethostname(), _free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory=8000"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        text = _SLURM_CONF.format(host=host, port=ports[0], folder=self.folder, nodes=nodes, names=",".join(NODES))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(NODES)}\n")
        for node in NODES:
            own = self.folder / node
            own.mkdir()
            (own / "slurm.conf").write_text(text)
            # A separate folder for the PMIx clients of each node, as on a real cluster.
            (own / "mpi.conf").write_text(f"PMIxCliTmpDirBase={own}/tmp\n")

    def _start_node(self, node: str) -> None:
        # Delete the files of steps that a failure of the node ended, which slurmd would take for running ones.
        for name in ("spool", "tmp"):
            shutil.rmtree(self.folder / node / name, ignore_errors=True)
            (self.folder / node / name).mkdir()
        start = _NODE.format(hosts=shlex.quote(f"{self.folder}/hosts"), node=node)
        slurmd = ("slurmd", "-D", "-c", "-N", node, "-f", str(self.folder / node / "slurm.conf"))
        # The first process of the node is the shell, which reaps orphaned processes of jobs.
        self._daemon(*_NAMESPACES, "sh", "-ec", start, "sh", *slurmd, log=node)

    def _daemon(self, program: str, *options: str, log: str = "") -> None:
        """Start a daemon in the foreground. The kernel kills it when this process ends."""
        with (self.folder / f"{log or program}.log").open("ab") as output:
            self._daemons[log or program] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", program, *options],
                env=self.environment | {"PATH": f"{search_path()}:/usr/sbin:/sbin"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _idle(self) -> bool:
        done = self.run(["sinfo", "-h", "-N", "-o", "%N %T"], 5)
        return done.out.split("\n") == [*(f"{node} idle" for node in NODES), ""]

    def _until(self, holds: Callable[[], bool], timeout: float, what: str) -> None:
        end = time.monotonic() + timeout
        while not holds():
            for name, daemon in self._daemons.items():
                if daemon.poll() is not None:
                    code = daemon.returncode
                    raise ClusterError(f"expected {what}, got {name} at its end, exit code {code}\n{self.logs()}")
            if time.monotonic() > end:
                raise ClusterError(f"expected {what} within {timeout} s, got: no\n{self.logs()}")
            time.sleep(_POLL)

    def _stop(self) -> None:
        for node in NODES:
            self._cut_power(node)
        # In reverse order: the controller needs munged until its end.
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(_STOP_LIMIT)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def _cut_power(self, node: str) -> None:
        """Kill the first process of a node's namespaces, so that the kernel kills all others."""
        unshare = self._daemons.pop(node, None)
        if unshare is None:
            return
        first = _children(unshare.pid)
        unshare.kill()
        unshare.wait()
        end = time.monotonic() + _STOP_LIMIT
        while any(map(_lives, first)) and time.monotonic() < end:
            time.sleep(_POLL / 10)


def obstacle() -> str | None:
    """Return the reason why no cluster can run here; None if it can be tried."""
    if sys.platform != "linux":
        return f"Slurm: expected Linux, got {sys.platform}"
    if os.geteuid() != 0:
        return "Slurm: expected root, which its daemons require, got another user"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [program for program in _PROGRAMS if shutil.which(program, path=path) is None]
    if missing:
        packages = "apt install slurmctld slurmd slurm-client munge libpmix-dev util-linux mount hostname"
        return f"Slurm: expected {', '.join(missing)}, found none. Do: {packages}"
    return None


def _free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
