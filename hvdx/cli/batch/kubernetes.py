"""`hvdx job kubernetes`: the manifest of an MPIJob or a TrainJob, two kinds of jobs that Kubeflow's operators run."""

import argparse
import json
import re
from collections.abc import Sequence

from hvdx.cli.batch.job_script import DEFAULTS, check_count, check_name, check_strategy, command_of, parse_time
from hvdx.cli.batch.template import Value, fill, template
from hvdx.errors import ConfigError

#: Kinds of jobs and the template of each.
KINDS = {"mpijob": "mpijob.yaml", "trainjob": "trainjob.yaml"}
SYSTEM = "kubernetes"

# The operators mount the host file there.
_HOSTFILE = "/etc/mpi/hostfile"
# The launcher starts again this many times if its own pod is lost. `hvdx run` handles all other failures.
_LAUNCHERS = 3
_QUANTITY = r"[1-9]\d*(?:\.\d+)?(?:m|k|M|G|T|Ki|Mi|Gi|Ti)?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that only Kubernetes has."""
    add = parser.add_argument_group("pods").add_argument
    add("--image", help="image of all pods, with hvdx, sshd and the user hvdx; see docs/containers.md")
    add("--kind", help="mpijob (Kubeflow's MPI operator) or trainjob (Kubeflow's Trainer) (default: mpijob)")
    add("--nodes", type=int, metavar="N", help="number of pods (default: 1)")
    add("--gpus-per-node", type=int, metavar="N", help="GPUs of each pod (default: none)")
    add("--tasks-per-node", type=int, metavar="N", help="ranks in each pod (default: one for each GPU, or 1)")
    add("--cpus-per-task", type=int, metavar="N", help="cores for each rank (default: 1)")
    add("--memory", metavar="SIZE", help="memory of each pod, such as 16Gi, shared memory included (default: no limit)")
    add("--namespace", help="namespace of the job (default: that of kubectl)")
    add("--claim", metavar="NAME:PATH", help="volume claim that all pods mount at PATH: script, data, checkpoints")
    add("--folder", metavar="PATH", help="working directory of the command (default: PATH of --claim, or the image's)")
    add("--time", metavar="HH:MM:SS", help="time limit; or DAYS-HH:MM:SS (default: none)")
    add("--name", help="name of the job (default: name of the Python file)")
    add("--checkpoint", metavar="DIR", help="save the training there; after a failure, start again from there")
    restarts = f"restarts after failures, with --checkpoint (default: {DEFAULTS['max_restarts']})"
    add("--max-restarts", type=int, metavar="N", help=restarts)


def manifest(args: argparse.Namespace, words: Sequence[str]) -> str:
    """Return the manifest of a job.

    Raises:
        ConfigError: if an option is missing or wrong.
    """
    command = command_of(args.program, SYSTEM)
    kind = args.kind or "mpijob"
    if kind not in KINDS:
        raise ConfigError(f"job: --kind: expected {' or '.join(KINDS)}, got {kind!r}. Do: --kind mpijob")
    if not args.image:
        raise ConfigError(
            "job: --image: expected the name of an image, got nothing. Do: build one, see docs/containers.md."
        )
    if args.max_restarts is not None and not args.checkpoint:
        raise ConfigError(
            "job: --max-restarts: expected --checkpoint DIR too, got nothing: a restart would begin from scratch. "
            "Do: add --checkpoint DIR, on the volume of --claim."
        )
    claim, path = _claim(args.claim)
    folder = args.folder or path
    gpus = check_count("--gpus-per-node", args.gpus_per_node, 0) or 0
    each = check_count("--tasks-per-node", args.tasks_per_node, 1) or gpus or 1
    cores = check_count("--cpus-per-task", args.cpus_per_task, 1) or 1
    mounts = [f"{{name: data, mountPath: {json.dumps(path)}}}"] if claim else []
    volumes = [f"{{name: data, persistentVolumeClaim: {{claimName: {json.dumps(claim)}}}}}"] if claim else []
    values: dict[str, Value] = {
        # It becomes a comment, so it must be one line.
        "made_by": " ".join(" ".join(words).split()),
        "name": _dns_name("--name", args.name or check_name(None, command).lower().replace("_", "-")),
        "namespace": None if args.namespace is None else _dns_name("--namespace", args.namespace),
        "image": json.dumps(args.image),
        "nodes": check_count("--nodes", args.nodes, 1) or 1,
        "tasks_per_node": each,
        "limits": _limits(each * cores, gpus, args.memory),
        "seconds": parse_time(args.time) if args.time else None,
        "retries": _LAUNCHERS if args.checkpoint else 0,
        "launch": _listed(_launch(args, command)),
        "folder": json.dumps(folder) if folder else None,
        "env": _env({"HVDX_CPUS_PER_TASK": str(cores), "HVDX_STRATEGY": check_strategy(args.strategy)}),
        # Pods have 64 MB of shared memory, which is less than the ranks of a pod may use.
        "mounts": ", ".join(["{name: shm, mountPath: /dev/shm}", *mounts]),
        "volumes": ", ".join(["{name: shm, emptyDir: {medium: Memory}}", *volumes]),
        "launcher_mounts": f"[{mounts[0]}]" if mounts else None,
        "launcher_volumes": f"[{volumes[0]}]" if volumes else None,
    }
    return fill(template(KINDS[kind]), values)


def _launch(args: argparse.Namespace, command: Sequence[str]) -> list[str]:
    """Return the command of the launcher."""
    words = ["hvdx", "run", "--hostfile", _HOSTFILE]
    if args.checkpoint:
        chosen = check_count("--max-restarts", args.max_restarts, 0)
        restarts = DEFAULTS["max_restarts"] if chosen is None else chosen
        words += ["--checkpoint", args.checkpoint, "--max-restarts", str(restarts)]
    return [*words, *command]


def _claim(text: str | None) -> tuple[str, str]:
    """Return name and path of a volume claim; two empty texts for none."""
    if text is None:
        return "", ""
    name, _, path = text.partition(":")
    if not path.startswith("/"):
        raise ConfigError(
            f"job: --claim: expected NAME:PATH with an absolute path, got {text!r}. Do: --claim training:/data"
        )
    return _dns_name("--claim", name), path


def _dns_name(what: str, name: str) -> str:
    # Pods' host names add up to 20 characters to the name of a job, and may have 63.
    if not re.fullmatch(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?", name):
        raise ConfigError(
            f"job: {what}: expected up to 40 lower-case letters, digits and dashes, got {name!r}. "
            f"Do: {what} {'training:/data' if what == '--claim' else 'training'}"
        )
    return name


def _limits(cores: int, gpus: int, memory: str | None) -> str:
    if memory is not None and not re.fullmatch(_QUANTITY, memory):
        raise ConfigError(f"job: --memory: expected a size such as 16Gi, got {memory!r}. Do: --memory 16Gi")
    limits = [f'cpu: "{cores}"', f"memory: {memory}" if memory else "", f"nvidia.com/gpu: {gpus}" if gpus else ""]
    return ", ".join(filter(None, limits))


def _listed(words: Sequence[str]) -> str:
    # Kubernetes replaces $(NAME) in a command; $$ stands for one $.
    return ", ".join(json.dumps(word.replace("$(", "$$(")) for word in words)


def _env(variables: dict[str, str | None]) -> str:
    pairs = [(name, value) for name, value in variables.items() if value is not None]
    return f"[{', '.join(f'{{name: {name}, value: {json.dumps(value)}}}' for name, value in pairs)}]"
