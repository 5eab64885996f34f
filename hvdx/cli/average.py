"""`hvdx average`: the mean of saved networks, in their own format."""

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdx.cli.common.progress import Progress
from hvdx.cli.common.termination import TERMINATED, TerminatedError, sigterm_raises
from hvdx.errors import ConfigError, HvdxError
from hvdx.report.table import quantity

NAME = "average"
HELP = "average saved networks: Keras, TensorFlow, PyTorch, safetensors, MXNet"
EXAMPLE = "hvdx average rank0.keras rank1.keras -o mean.keras"
DETAILS = """\
formats, each read and written as its own framework does, which need not be installed:
  Keras         .keras, .weights.h5                 TensorFlow    checkpoints (the prefix), SavedModel folders
  PyTorch       .pt and .pth; nothing is executed   safetensors   .safetensors        MXNet Gluon   .params
  Hugging Face  checkpoint folders, in shards or not, or their .index.json

The networks have to be of one architecture: the same tensors, with the same shapes and dtypes. Sums are float64, and
every tensor keeps its dtype. All that is no tensor (configuration, metadata, epoch numbers) is the first network's.
Integers and booleans have no mean: they have to be equal, or --integers says whose are taken.

Batch normalisation: the mean of the networks' statistics is not the mean network's statistics. --recalibrate computes
them anew on inputs you give (.keras only); without it there is a warning.

An existing output is kept unless --force is given, and no output is ever half written.

  hvdx average a.pt b.pt c.pt -o mean.pt --weights 0.5,0.3,0.2     only the ratios of the weights matter
  hvdx average epoch_*.weights.h5 -o swa.weights.h5 --swa          snapshots of one run, the oldest first
  hvdx average step_*.safetensors -o ema.safetensors --ema 0.99    each new one counts 0.01, what was before it 0.99
  hvdx average a.keras b.keras -o mean.keras --recalibrate x.npz   inputs as model.fit takes them
  hvdx average a.params b.params --report                          how far apart they are, and nothing else

Exit code 0: written; 2: it was not, and the message names file and tensor; 143: SIGTERM came, and nothing is left.

"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "hvdx average NETWORK NETWORK [NETWORK ...] -o OUT [options]"
    add = parser.add_argument
    add("networks", nargs="+", type=Path, metavar="NETWORK", help="two saved networks or more, of one format")
    add("-o", "--output", type=Path, metavar="OUT", help="where to write; may be left out with --report")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--weights", type=_numbers, metavar="W,W,...", help="a number a network; all alike by default")
    how.add_argument("--ema", type=float, metavar="DECAY", help="exponential moving average, the oldest network first")
    how.add_argument("--swa", action="store_true", help="stochastic weight averaging: snapshots of one run, all alike")
    add(
        "--integers",
        choices=("equal", "first", "last"),
        help="integers and booleans: have to be equal (default), or are one network's (--swa, --ema: the last's)",
    )
    add(
        "--recalibrate",
        type=Path,
        metavar="DATA",
        help="compute batch normalisation anew on the inputs in a .npz or .npy file",
    )
    add("--report", action="store_true", help="print how far the networks are from each other, tensor by tensor")
    add("--force", action="store_true", help="replace OUT if it exists; a link is followed")
    add("--quiet", action="store_true", help="no progress, and no line at the end; warnings and errors stay")


def run(args: argparse.Namespace) -> int:
    """Report, average, or both; 0 unless an error or SIGTERM stops it."""
    came: list[int] = []
    try:
        with sigterm_raises() as came:
            return _run(args)
    except (TerminatedError, HvdxError):
        # A library that is called in between may make an error of its own of it.
        if not came:
            raise
    print("hvdx: terminated", file=sys.stderr)
    return TERMINATED


def _run(args: argparse.Namespace) -> int:
    if args.output is None and not args.report:
        raise ConfigError(f"average: -o: expected where to write the mean, got nothing. Do: {EXAMPLE}")
    # What was opened and checked for the report should not have been for nothing.
    if args.output is not None:
        from hvdx.averaging.output import check_free

        check_free(args.output, args.force, args.networks)
    if args.report:
        _report(args)
    if args.output is not None:
        _average(args)
    return 0


def _report(args: argparse.Namespace) -> None:
    from hvdx.averaging.api import compare
    from hvdx.averaging.distance import table

    with _shown("comparing", args.quiet) as progress:
        rows = compare(args.networks, progress)
    print(table(rows, [str(path) for path in args.networks]), flush=True)


def _average(args: argparse.Namespace) -> None:
    from hvdx.averaging.api import average
    from hvdx.averaging.formats import open_network

    begin = time.monotonic()
    with _shown("averaging", args.quiet) as progress, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        average(
            args.networks,
            args.output,
            weights=args.weights,
            ema=args.ema,
            swa=args.swa,
            integers=args.integers,
            recalibrate=args.recalibrate,
            force=args.force,
            progress=progress,
        )
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            print(f"hvdx: warning: {warning.message}", file=sys.stderr)
    if not args.quiet:
        # Read back what was written: the line tells of the result, not of the intention.
        written = open_network(args.output)
        sizes = [tensor.nbytes for tensor in written.tensors.values()]
        written.close()
        print(
            f"{args.output}: mean of {len(args.networks)} networks, {written.format}, {len(sizes)} tensors, "
            f"{quantity(sum(sizes), 'B')}, {time.monotonic() - begin:.1f} s"
        )


@contextmanager
def _shown(what: str, quiet: bool) -> Iterator[Any]:
    """A progress line that is gone in the end; None where nobody wants one."""
    progress = None if quiet else Progress(what)
    try:
        yield progress
    finally:
        if progress is not None:
            progress.close()


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas, such as 0.5,0.3,0.2, got {text!r}") from None
