"""`hvdx average`: the mean of saved networks, in their own format."""

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdx.cli.commands import COMMANDS
from hvdx.cli.common.termination import TERMINATED, TerminatedError, sigterm_raises
from hvdx.errors import ConfigError, HvdxError
from hvdx.log import Log
from hvdx.report.table import quantity

_log = Log(__name__)

_QUIET_SECONDS = 1.0
_TERMINAL_SECONDS = 0.2
_PLAIN_SECONDS = 10.0


class Progress:
    """Progress line, updated by calls with the bytes done and the total. Work of less than a second shows nothing."""

    def __init__(self, what: str):
        self._what, self._begin = what, time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = self._begin + (_QUIET_SECONDS if self._terminal else _PLAIN_SECONDS)
        self._width = 0

    def __call__(self, done: int, total: int) -> None:
        """Show the progress if the last line is old enough."""
        now = time.monotonic()
        if now < self._next or not done:
            return
        self._next = now + (_TERMINAL_SECONDS if self._terminal else _PLAIN_SECONDS)
        rate = done / (now - self._begin)
        left = max(total - done, 0) / rate
        line = (
            f"{self._what}: {min(done / (total or 1), 1):4.0%} of {quantity(total, 'B')} read, "
            f"{quantity(rate, 'B/s')}, {left:.0f} s left"
        )
        if self._terminal:
            sys.stderr.write(f"\r{line.ljust(self._width)}")
            self._width = len(line)
        else:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Erase the line."""
        if self._width:
            sys.stderr.write(f"\r{' ' * self._width}\r")
            sys.stderr.flush()
            self._width = 0


EXAMPLE = COMMANDS["average"].example
DETAILS = """\
formats; most frameworks need not be installed (Keras files need h5py, TensorFlow's formats need TensorFlow):
  Keras         .keras, .weights.h5                 TensorFlow    checkpoints (the prefix), SavedModel folders
  PyTorch       .pt and .pth; nothing is executed   safetensors   .safetensors        MXNet Gluon   .params
  Hugging Face  checkpoint folders with or without shards, or their .index.json

All networks must have one architecture: the same tensors, with the same shapes and dtypes. Sums are computed in
float64, and every tensor keeps its dtype. Everything else (configuration, metadata) is copied from the first network.
Integers and booleans have no mean: they must be equal, or --integers selects the network from which they are copied.

Batch normalisation: the mean of the networks' statistics is not the mean network's statistics. --recalibrate computes
the latter from inputs that you supply (.keras only); without it, hvdx prints a warning.

An existing output is kept unless --force is given. The output appears under its name only when it is complete.

  hvdx average a.pt b.pt c.pt -o mean.pt --weights 0.5,0.3,0.2     only the ratios of the weights matter
  hvdx average epoch_*.weights.h5 -o swa.weights.h5 --swa          snapshots of one run, the oldest first
  hvdx average step_*.safetensors -o ema.safetensors --ema 0.99    mean = 0.99 * mean + 0.01 * next network
  hvdx average a.keras b.keras -o mean.keras --recalibrate x.npz   inputs in the form that model.fit takes
  hvdx average a.params b.params --report                          print the distances, write nothing

Exit code 0: success; 2: an error, and the message names file and tensor; 143: ended by SIGTERM, no file is left behind.

"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "hvdx average NETWORK NETWORK [NETWORK ...] -o OUT [options]"
    add = parser.add_argument
    add("networks", nargs="+", type=Path, metavar="NETWORK", help="two saved networks or more, of one format")
    add("-o", "--output", type=Path, metavar="OUT", help="file or folder to write; may be left out with --report")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--weights", type=_numbers, metavar="W,W,...", help="one number for each network; equal by default"
    )
    how.add_argument("--ema", type=float, metavar="DECAY", help="exponential moving average, the oldest network first")
    how.add_argument(
        "--swa", action="store_true", help="stochastic weight averaging: snapshots of one run, equal weights"
    )
    add(
        "--integers",
        choices=("equal", "first", "last"),
        help="integers and booleans: must be equal (default), or come from the first or last network "
        "(--swa, --ema: last by default)",
    )
    add(
        "--recalibrate",
        type=Path,
        metavar="DATA",
        help="recompute the batch normalisation statistics on the inputs in a .npz or .npy file",
    )
    add("--report", action="store_true", help="print the distances between the networks, tensor by tensor")
    add("--force", action="store_true", help="replace OUT if it exists; links are followed")
    add("--quiet", action="store_true", help="print no progress and no final line")


def run(args: argparse.Namespace) -> int:
    """Report, average, or both. Return 0, or 143 after SIGTERM."""
    received: list[int] = []
    try:
        with sigterm_raises() as received:
            return _run(args)
    except (TerminatedError, HvdxError):
        # A library in between may have turned TerminatedError into an error of its own.
        if not received:
            raise
    _log.error("terminated")
    return TERMINATED


def _run(args: argparse.Namespace) -> int:
    if args.output is None and not args.report:
        raise ConfigError(f"average: -o: expected a path for the mean, got nothing. Do: {EXAMPLE}")
    # Check the output before the report, which reads all inputs, so that a wrong path fails at once.
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
            _log.warning(str(warning.message), head="hvdx: warning: ")
    if not args.quiet:
        # Open the output again, so that the line describes the file that was written.
        written = open_network(args.output)
        sizes = [tensor.nbytes for tensor in written.tensors.values()]
        written.close()
        print(
            f"{args.output}: mean of {len(args.networks)} networks, {written.format}, {len(sizes)} tensors, "
            f"{quantity(sum(sizes), 'B')}, {time.monotonic() - begin:.1f} s"
        )


@contextmanager
def _shown(what: str, quiet: bool) -> Iterator[Any]:
    """Yield a progress line that is erased at the end, or None if `quiet`."""
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
