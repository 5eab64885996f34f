"""`hvdx job`: make the batch script of a training, and print, write or submit it."""

import argparse
import shlex
import subprocess
from pathlib import Path

from hvdx.cli.batch import kubernetes, site
from hvdx.cli.batch.job_script import BATCH, DEFAULTS, LAUNCHERS, VENDORS, make_plan, script
from hvdx.cli.commands import COMMANDS
from hvdx.cli.common.processes import program_of
from hvdx.errors import ConfigError
from hvdx.log import Log

_log = Log(__name__)

NAME = "job"
EXAMPLE = COMMANDS["job"].example
DETAILS = """\
The script is short, has comments, and is yours to keep and edit. By default it is printed; -o writes it to a file,
--submit submits it to the batch system. Shortly before its time limit, the job gets a signal. With the callback
hvdx.keras.Checkpoint, training then saves, the job goes back into the queue, and training resumes in its next run.

systems:
  slurm        sbatch; srun or mpirun starts the ranks      pbs       PBS Professional, OpenPBS; mpirun
  lsf          bsub; mpirun or jsrun starts the ranks       mpirun    hosts from a file, no queue
  horovodrun   hosts from a file, no queue                  site      prints an example of the site file
  kubernetes   kubectl; an MPIJob or a TrainJob of Kubeflow

Settings that all jobs share (account, partition, modules) belong in a site file; `hvdx job site` prints its path and
an example. See also docs/batch.md.

  hvdx job SYSTEM --help                                             the options of one system
  hvdx job slurm ... --strategy threshold -o train.sh -- python ...  write a file, with another strategy
  hvdx job slurm ... --array 0-3 -- python train.py --seed '$SLURM_ARRAY_TASK_ID'
                                                                     four jobs; each job expands $NAME itself
  hvdx job pbs ... --submit -- python train.py                       submit at once
  hvdx job mpirun --hosts hosts.txt -- python train.py               no batch system

"""

_SYSTEMS = {
    "slurm": "a script for sbatch",
    "pbs": "a script for qsub of PBS Professional or OpenPBS",
    "lsf": "a script for bsub",
    "mpirun": "a script that starts mpirun on the hosts of a file",
    "horovodrun": "a script that starts horovodrun on the hosts of a file",
    kubernetes.SYSTEM: "the manifest of a job for Kubeflow on Kubernetes",
}
_EXAMPLES = {
    "slurm": f"{EXAMPLE} --epochs 90",
    "pbs": "hvdx job pbs --nodes 2 --tasks-per-node 8 --time 06:00:00 --queue workq -- python train.py",
    "lsf": 'hvdx job lsf --nodes 2 --gpus-per-node 4 --time 06:00:00 --env-setup "module load cuda" -- python train.py',
    "mpirun": "hvdx job mpirun --hosts hosts.txt -- python train.py",
    "horovodrun": "hvdx job horovodrun --hosts hosts.txt -n 4 -- python train.py",
    kubernetes.SYSTEM: "hvdx job kubernetes --image registry/me/train --nodes 2 --claim data:/data -- python train.py",
}
# The commands that submit a script. bsub reads #BSUB lines from its standard input only.
_SUBMIT = {
    "slurm": ("sbatch",),
    "pbs": ("qsub",),
    "lsf": ("bsub",),
    kubernetes.SYSTEM: ("kubectl", "apply", "-f"),
}
# Option names that differ from their attributes, and attributes that the script's first lines leave out.
_SPELLED = {"ranks": "-n", "directives": "--directive"}
_NOT_REPEATED = {"command", "system", "program", "file", "force", "submit", "run"}
_SUBMIT_TIMEOUT = 120  # seconds; a busy controller may take a minute


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the systems, each with its options."""
    parser.usage = "hvdx job SYSTEM [options] -- COMMAND [ARGUMENT ...]"
    systems = parser.add_subparsers(dest="system", metavar="SYSTEM", required=True, help=argparse.SUPPRESS)
    for system, text in _SYSTEMS.items():
        one = systems.add_parser(
            system,
            description=f"Write {text}.",
            epilog=f"example:\n  {_EXAMPLES[system]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        one.usage = f"hvdx job {system} [options] -- COMMAND [ARGUMENT ...]"
        if system == kubernetes.SYSTEM:
            kubernetes.add_arguments(one)
            _add_strategy(one.add_argument_group("launch"))
        else:
            _add_size(one, system)
            if system in BATCH:
                _add_queue(one, system)
            _add_start(one, system)
        _add_output(one, system)
        one.add_argument("program", nargs=argparse.REMAINDER, metavar="COMMAND", help="command of every rank")
    systems.add_parser("site", description="Print the path of the site file, and an example.")


def _add_size(parser: argparse.ArgumentParser, system: str) -> None:
    add = parser.add_argument_group("size").add_argument
    if system in BATCH:
        add("--nodes", type=int, metavar="N", help="number of hosts (default: 1)")
        add("--gpus-per-node", type=int, metavar="N", help="GPUs on each host (default: none)")
        add("--tasks-per-node", type=int, metavar="N", help="ranks on each host (default: one for each GPU, or 1)")
        add("--cpus-per-task", type=int, metavar="N", help="cores for each rank (default: --threads)")
        add("--time", metavar="HH:MM:SS", help="time limit; or DAYS-HH:MM:SS")
    else:
        add("--hosts", metavar="FILE", help="file with one host a line: `name slots=4`; MPICH and Intel: `name:4`")
        add("-n", dest="ranks", type=int, metavar="N", help="number of ranks (default: all slots of FILE)")
    add("--threads", type=int, metavar="N", help="value of OMP_NUM_THREADS (default: hvdx divides the cores)")


def _add_queue(parser: argparse.ArgumentParser, system: str) -> None:
    add = parser.add_argument_group("queue").add_argument
    add("--name", help="name of the job (default: name of the Python file)")
    add("--account", help="account that is charged")
    if system == "slurm":
        add("--partition", help="partition of the job")
    else:
        add("--queue", help="queue of the job")
    if system != "pbs":
        add("--array", metavar="1-4", help="an array of jobs with these indices; each job is requeued separately")
    add("--output", metavar="FILE", help="file for the job's output")
    add(
        "--signal",
        type=int,
        metavar="SECONDS",
        help=f"time before the limit at which training gets the signal to save (default: {DEFAULTS['signal']})",
    )
    add(
        "--max-restarts",
        type=int,
        metavar="N",
        help=f"number of times that the job may go back into the queue (default: {DEFAULTS['max_restarts']})",
    )
    add(
        "--directive",
        dest="directives",
        action="append",
        metavar="TEXT",
        help="additional line for the batch system, such as --directive=--exclusive; may be repeated",
    )


def _add_strategy(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--strategy", help="value of HVDX_STRATEGY, such as threshold or all_reduce:compression=fp16")


def _add_start(parser: argparse.ArgumentParser, system: str) -> None:
    group = parser.add_argument_group("launch")
    _add_strategy(group)
    add = group.add_argument
    add(
        "--env-setup",
        action="append",
        metavar="LINE",
        help="shell line to run before training, such as 'module load openmpi'; may be repeated; "
        "replaces the lines of the site file",
    )
    if len(LAUNCHERS[system]) > 1:
        add("--launcher", help=f"{' or '.join(LAUNCHERS[system])} (default: the first)")
    if system == "slurm":
        add("--mpi-plugin", metavar="NAME", help=f"plugin for srun --mpi=NAME (default: {DEFAULTS['mpi_plugin']})")
    add("--mpi", metavar="VENDOR", help=f"MPI that mpirun belongs to: {', '.join(VENDORS)} (default: the first)")
    if system in BATCH:
        add(
            "--checkpoint",
            metavar="DIR",
            help="save the training there, and after a failure first start it again inside of the job (hvdx run)",
        )
        add(
            "--survive",
            action="store_true",
            default=None,
            help="when a worker dies, the others go on at once; with --checkpoint, Open MPI 5",
        )


def _add_output(parser: argparse.ArgumentParser, system: str) -> None:
    add = parser.add_argument_group("output").add_argument
    add("-o", dest="file", type=Path, metavar="FILE", help="write the script to FILE instead of printing it")
    add("--force", action="store_true", help="replace FILE if it exists")
    submit = f"submit the script with {_SUBMIT[system][0]}" if system in _SUBMIT else "not available without a queue"
    add("--submit", action="store_true", help=submit)


def run(args: argparse.Namespace) -> int:
    """Make the script, and print, write or submit it."""
    if args.system == "site":
        return _show_site()
    if args.submit and args.system not in _SUBMIT:
        raise ConfigError(
            f"job: --submit: expected a system with a queue ({', '.join(_SUBMIT)}), got {args.system}. "
            "Do: write the script with -o train.sh, and start ./train.sh on the first host."
        )
    if args.system == kubernetes.SYSTEM:
        text = kubernetes.manifest(args, _words(args))
    else:
        text = script(make_plan(args, site.settings(args.system), _words(args)))
    if args.file is not None:
        _write(args.file, text, args.force, executable=args.system != kubernetes.SYSTEM)
    if args.submit:
        print(_submit(args.system, text, args.file))
    elif args.file is None:
        print(text, end="")
    else:
        _log.info(f"{args.file}: written; {_next_step(args.system, args.file)}", head="")
    return 0


def _words(args: argparse.Namespace) -> list[str]:
    """Return the words of the command line, quoted for a shell, for the script's first lines."""
    words = ["hvdx", NAME, args.system]
    for key, value in vars(args).items():
        if key not in _NOT_REPEATED and value is not None:
            option = _SPELLED.get(key, f"--{key.replace('_', '-')}")
            if value is True:
                words.append(option)
                continue
            for item in value if isinstance(value, list) else [value]:
                # The form --option=value allows a value that begins with a dash.
                words += [f"{option}={shlex.quote(str(item))}"] if option.startswith("--") else [option, str(item)]
    return [*words, "--", *map(shlex.quote, program_of(args.program))]


def _write(path: Path, text: str, force: bool, executable: bool) -> None:
    try:
        with path.open("w" if force else "x") as file:
            file.write(text)
        if executable:
            path.chmod(0o755)
    except FileExistsError:
        raise ConfigError(
            f"job: -o: expected a file that does not exist, got {path}. Do: --force to replace it, or another name."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"job: -o: expected a file that can be written, got {path} ({error.strerror}). Do: create its folder first."
        ) from None


def _submit(system: str, text: str, path: Path | None) -> str:
    """Submit a script to the batch system, and return the answer."""
    command = [*_SUBMIT[system]]
    if path is not None and system != "lsf":
        command.append(str(path))
    elif system == kubernetes.SYSTEM:
        command.append("-")
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_SUBMIT_TIMEOUT, check=False, errors="replace"
        )
    except FileNotFoundError:
        raise ConfigError(
            f"job: --submit: expected {command[0]} on PATH, found none. "
            "Do: run it on a login node of the cluster, or leave out --submit and copy the script there."
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"job: --submit: expected an answer from {command[0]} within {_SUBMIT_TIMEOUT} seconds, got none. "
            "Do: check the queue for the job before you submit it again."
        ) from None
    said = (done.stdout + done.stderr).strip()
    if done.returncode:
        raise ConfigError(
            f"job: --submit: expected {command[0]} to accept the script, got exit code {done.returncode}: {said}. "
            "Do: add the missing option, or add it to the site file (hvdx job site)."
        )
    return said


def _next_step(system: str, path: Path) -> str:
    if system not in _SUBMIT:
        return f"start it with: {path if path.is_absolute() else f'./{path}'}"
    return f"submit it with: {' '.join(_SUBMIT[system])} {'< ' if system == 'lsf' else ''}{path}"


def _show_site() -> int:
    path = site.location()
    state = "which exists; this command does not change it" if path.exists() else "which does not exist yet"
    print(f"# The site file of `hvdx job` is {path}, {state}.")
    print(site.example(), end="")
    return 0
