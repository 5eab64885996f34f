"""`hvdx job`: a batch script for a training, printed, written, or handed to the batch system."""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from hvdx.cli.batch import site
from hvdx.cli.batch.plan import BATCH, DEFAULTS, LAUNCHERS, VENDORS, make_plan
from hvdx.cli.batch.script import script
from hvdx.cli.common.processes import program_of
from hvdx.errors import ConfigError

NAME = "job"
HELP = "write the script of a batch job: Slurm, PBS, LSF, or plain hosts"
EXAMPLE = "hvdx job slurm --nodes 4 --gpus-per-node 4 --time 12:00:00 -- python train.py"
DETAILS = """\
The script is short, has comments, and is yours to keep and edit. It is printed; -o writes it to a file, --submit hands
it to the batch system. Before its time is over the job is told to save, and goes back into the queue to go on.

systems:
  slurm        sbatch; ranks by srun, or mpirun             pbs       PBS Professional, OpenPBS; ranks by mpirun
  lsf          bsub; ranks by mpirun, or jsrun              mpirun    hosts from a file, no queue
  horovodrun   hosts from a file, no queue                  site      prints an example of the site file

Account, partition, modules and the like go into a site file once; `hvdx job site` tells where. docs/batch.md has more.

  hvdx job SYSTEM --help                                             the options of one system
  hvdx job slurm ... --strategy threshold -o train.sh -- python ...  into a file, with another strategy
  hvdx job slurm ... --array 0-3 -- python train.py --seed '$SLURM_ARRAY_TASK_ID'
                                                                     four jobs; $NAME is left for the job to fill in
  hvdx job pbs ... --submit -- python train.py                       to the queue at once
  hvdx job mpirun --hosts hosts.txt -- python train.py               no batch system

"""

_SYSTEMS = {
    "slurm": "a script for sbatch",
    "pbs": "a script for qsub of PBS Professional or OpenPBS",
    "lsf": "a script for bsub",
    "mpirun": "a script that starts mpirun on the hosts of a file",
    "horovodrun": "a script that starts horovodrun on the hosts of a file",
}
_EXAMPLES = {
    "slurm": f"{EXAMPLE} --epochs 90",
    "pbs": "hvdx job pbs --nodes 2 --tasks-per-node 8 --time 06:00:00 --queue workq -- python train.py",
    "lsf": 'hvdx job lsf --nodes 2 --gpus-per-node 4 --time 06:00:00 --env-setup "module load cuda" -- python train.py',
    "mpirun": "hvdx job mpirun --hosts hosts.txt -- python train.py",
    "horovodrun": "hvdx job horovodrun --hosts hosts.txt -n 4 -- python train.py",
}
# How each takes a script: LSF reads the #BSUB lines of its standard input alone.
_SUBMIT = {"slurm": "sbatch", "pbs": "qsub", "lsf": "bsub"}
# Options that are not spelled as their values are called, and what the script's first lines do not repeat.
_SPELLED = {"ranks": "-n", "directives": "--directive"}
_NOT_REPEATED = {"command", "system", "program", "file", "force", "submit", "run"}
_PATIENCE = 120  # seconds; a busy controller may take a minute


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
        _add_size(one, system)
        if system in BATCH:
            _add_queue(one, system)
        _add_start(one, system)
        _add_output(one, system)
        one.add_argument("program", nargs=argparse.REMAINDER, metavar="COMMAND", help="what every rank runs")
    systems.add_parser("site", description="Print an example of the site file, and where it belongs.")


def _add_size(parser: argparse.ArgumentParser, system: str) -> None:
    add = parser.add_argument_group("how much").add_argument
    if system in BATCH:
        add("--nodes", type=int, metavar="N", help="hosts; 1 by default")
        add("--gpus-per-node", type=int, metavar="N", help="GPUs on each host; none by default")
        add("--tasks-per-node", type=int, metavar="N", help="ranks on each host; one for each GPU by default, or 1")
        add("--cpus-per-task", type=int, metavar="N", help="cores for each rank; --threads by default")
        add("--time", metavar="HH:MM:SS", help="the time limit; or DAYS-HH:MM:SS")
    else:
        add("--hosts", metavar="FILE", help="a host on each line: `name slots=4`; MPICH and Intel: `name:4`")
        add("-n", dest="ranks", type=int, metavar="N", help="all ranks; by default as many as FILE has room for")
    add("--threads", type=int, metavar="N", help="sets OMP_NUM_THREADS; by default hvdx shares out the cores")


def _add_queue(parser: argparse.ArgumentParser, system: str) -> None:
    add = parser.add_argument_group("in the queue").add_argument
    add("--name", help="of the job; by default that of the Python file")
    add("--account", help="whom it is charged to")
    if system == "slurm":
        add("--partition", help="where it queues")
    else:
        add("--queue", help="where it queues")
    if system != "pbs":
        add("--array", metavar="1-4", help="several jobs that differ in a number; each is requeued alone")
    add("--output", metavar="FILE", help="where the job's output goes")
    add("--signal", type=int, metavar="SECONDS", help=f"before the end: save now; {DEFAULTS['signal']} by default")
    add(
        "--max-restarts",
        type=int,
        metavar="N",
        help=f"how often it may go back into the queue; {DEFAULTS['max_restarts']} by default, 0: never",
    )
    add(
        "--directive",
        dest="directives",
        action="append",
        metavar="TEXT",
        help="one more line for the batch system, such as --directive=--exclusive; may be repeated",
    )


def _add_start(parser: argparse.ArgumentParser, system: str) -> None:
    add = parser.add_argument_group("what runs").add_argument
    add("--strategy", help="sets HVDX_STRATEGY, such as threshold or all_reduce:compression=fp16")
    add(
        "--env-setup",
        action="append",
        metavar="LINE",
        help="run before training, such as 'module load openmpi'; may be repeated; replaces the site file's",
    )
    if len(LAUNCHERS[system]) > 1:
        add("--launcher", help=f"{' or '.join(LAUNCHERS[system])}; the first by default")
    if system == "slurm":
        add("--mpi-plugin", metavar="NAME", help=f"srun --mpi=NAME; {DEFAULTS['mpi_plugin']} by default")
    add("--mpi", metavar="VENDOR", help=f"whose mpirun: {', '.join(VENDORS)}; the first by default")


def _add_output(parser: argparse.ArgumentParser, system: str) -> None:
    add = parser.add_argument_group("where the script goes").add_argument
    add("-o", dest="file", type=Path, metavar="FILE", help="write it there, in place of printing it")
    add("--force", action="store_true", help="replace FILE if it exists")
    add("--submit", action="store_true", help=f"hand it to {_SUBMIT.get(system, 'a batch system, which this is not')}")


def run(args: argparse.Namespace) -> int:
    """Make the script; print, write or submit it."""
    if args.system == "site":
        return _show_site()
    if args.submit and args.system not in _SUBMIT:
        raise ConfigError(
            f"job: --submit: expected a system with a queue ({', '.join(BATCH)}), got {args.system}. "
            "Do: write the script with -o train.sh, and start ./train.sh on the first host."
        )
    text = script(make_plan(args, site.settings(args.system), _words(args)))
    if args.file is not None:
        _write(args.file, text, args.force)
    if args.submit:
        print(_submit(args.system, text, args.file))
    elif args.file is None:
        print(text, end="")
    else:
        print(f"{args.file}: written; {_next_step(args.system, args.file)}", file=sys.stderr)
    return 0


def _words(args: argparse.Namespace) -> list[str]:
    """The command line, for the script's first lines; as it would be typed again."""
    words = ["hvdx", NAME, args.system]
    for key, value in vars(args).items():
        if key not in _NOT_REPEATED and value is not None:
            option = _SPELLED.get(key, f"--{key.replace('_', '-')}")
            for item in value if isinstance(value, list) else [value]:
                # With = a value may begin with a dash.
                words += [f"{option}={shlex.quote(str(item))}"] if option.startswith("--") else [option, str(item)]
    return [*words, "--", *map(shlex.quote, program_of(args.program))]


def _write(path: Path, text: str, force: bool) -> None:
    try:
        with path.open("w" if force else "x") as file:
            file.write(text)
        path.chmod(0o755)
    except FileExistsError:
        raise ConfigError(
            f"job: -o: expected a name that is still free, got {path}. Do: --force, to replace it, or another name."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"job: -o: expected a file that can be written, got {path} ({error.strerror}). Do: make its folder first."
        ) from None


def _submit(system: str, text: str, path: Path | None) -> str:
    """Hand a script to the batch system; what that said."""
    command = [_SUBMIT[system]]
    if path is not None and system != "lsf":
        command.append(str(path))
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_PATIENCE, check=False, errors="replace"
        )
    except FileNotFoundError:
        raise ConfigError(
            f"job: --submit: expected {command[0]} on PATH, found none. "
            "Do: run it on a login node of the cluster, or leave out --submit and take the script there."
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"job: --submit: expected an answer of {command[0]} within {_PATIENCE} seconds, got none. "
            "Do: look whether the job is in the queue before you try again."
        ) from None
    said = (done.stdout + done.stderr).strip()
    if done.returncode:
        raise ConfigError(
            f"job: --submit: expected {command[0]} to take the script, got exit code {done.returncode}: {said}. "
            "Do: give what it asks for as an option, or in the site file (hvdx job site)."
        )
    return said


def _next_step(system: str, path: Path) -> str:
    if system not in _SUBMIT:
        return f"start it with: {path if path.is_absolute() else f'./{path}'}"
    return f"submit it with: {_SUBMIT[system]} {'< ' if system == 'lsf' else ''}{path}"


def _show_site() -> int:
    path = site.location()
    state = "which exists; this does not change it" if path.exists() else "which does not exist yet"
    print(f"# The site file of `hvdx job` is {path}, {state}.")
    print(site.example(), end="")
    return 0
