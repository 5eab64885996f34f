"""The sub-commands of `hvdx`: what the help says about each, without importing it."""

from typing import NamedTuple


class Command(NamedTuple):
    """One sub-command. Its module, `hvdx.cli.NAME`, has `add_arguments(parser)`, `run(args)` and perhaps `DETAILS`.

    Attributes:
        help: description of the command, for the list of all.
        example: a call of it.
    """

    help: str
    example: str


#: By name, in the order of the help text.
COMMANDS = {
    "run": Command(
        "start a script on several workers",
        "hvdx run -n 4 python train.py",
    ),
    "doctor": Command(
        "check TensorFlow, Keras, MPI, Horovod and this machine, with a remedy for each problem",
        "hvdx doctor",
    ),
    "build-horovod": Command(
        "build Horovod for the TensorFlow and the MPI of this environment, and install it",
        "hvdx build-horovod",
    ),
    "build-kernels": Command(
        "compile the kernels of Threshold for this machine's processor, and keep them",
        "hvdx build-kernels",
    ),
    "advise": Command(
        "predict the fastest strategy for a script, without training",
        "hvdx advise --bandwidth 100mbit -n 2,4 -- python train.py",
    ),
    "simulate": Command(
        "run the strategies on up to 2048 virtual workers, with a virtual clock",
        'hvdx simulate --workers 4,64,1024 --bandwidth 100mbit,1gbit --strategies "all_reduce;threshold"',
    ),
    "job": Command(
        "write the script of a batch job: Slurm, PBS, LSF, Kubernetes, or plain hosts",
        "hvdx job slurm --nodes 4 --gpus-per-node 4 --time 12:00:00 -- python train.py",
    ),
    "bench": Command(
        "measure the codec: bits on the wire against entropy, kernels against memory speed",
        "hvdx bench wire",
    ),
    "lab": Command(
        "run a job on several emulated hosts of this machine, with links of a chosen speed",
        "hvdx lab -n 4 --bandwidth 100mbit -- python train.py",
    ),
    "compare": Command(
        "run a script under several strategies, and say which one is best",
        "hvdx compare --target val_accuracy=0.85 -- python train.py",
    ),
    "report": Command(
        "compare recorded runs: the verdict in words, charts on one HTML page, bars in the terminal",
        "hvdx report comparison --target val_accuracy=0.85",
    ),
    "trace": Command(
        "write the timeline of a recorded training, all ranks on one clock, for Perfetto",
        "hvdx trace runs/one -o trace.json",
    ),
    "average": Command(
        "average saved networks: Keras, TensorFlow, PyTorch, safetensors, MXNet",
        "hvdx average rank0.keras rank1.keras -o mean.keras",
    ),
}
