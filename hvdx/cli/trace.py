"""`hvdx trace`: the timeline of a recorded fit, for Perfetto."""

import argparse
import math
from pathlib import Path

from hvdx.errors import ConfigError

DETAILS = """\
DIR is a folder that HVDX_RECORD named. The command writes a file in Chrome's trace event format: open it in Perfetto
(https://ui.perfetto.dev, which reads it in the browser) or in chrome://tracing. Each rank is a process with two
threads: "epochs" has the epochs, the flushes after their steps and the evaluations; "steps" has the steps, and in them
computing, encoding, waiting, exchanging and decoding. Select a slice to see its bytes and its density.

  HVDX_RECORD=runs/one hvdx run -n 4 python train.py   record a training
  hvdx trace runs/one                                  write runs/one/trace.json
  hvdx trace runs/one --steps 200:300                  a part of a long training: some 1 kB a step and rank

A long "waiting" on one rank means that another one came late: look at what that one did in the same step. The parts of
a step are measured, and drawn in their order; docs/records.md says how.

"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="folder of the record")
    add("-o", "--output", type=Path, metavar="FILE.json", help="the trace (default: trace.json in DIR)")
    add("--steps", metavar="FIRST:LAST", default=":", help="steps of each rank, from 1 (default: all)")
    add("--fit", type=int, metavar="N", help="which fit, from 1, if the script has called fit several times")
    add("--force", action="store_true", help="overwrite the output even if it is not a trace")


def run(args: argparse.Namespace) -> int:
    """Read the record, and write the trace."""
    from hvdx.report import report_file, timeline
    from hvdx.report.records import read

    steps = parse_steps(args.steps)
    if not args.folder.is_dir():
        raise ConfigError(
            f"trace: expected the folder of a record, got {args.folder}, which is not a folder. "
            "Do: record a training with HVDX_RECORD=DIR."
        )
    path = args.output or args.folder / "trace.json"
    report_file.check(path, timeline.KIND, args.force)
    fits = read(args.folder)
    if (len(fits) > 1 and args.fit is None) or not 1 <= (args.fit or 1) <= len(fits):
        listed = "; ".join(f"{i}: {fit.folder}, {fit.strategy}" for i, fit in enumerate(fits, 1))
        raise ConfigError(
            f"trace: --fit: expected a number from 1 to {len(fits)}, got {args.fit}. Do: choose one of {listed}."
        )
    fit = fits[(args.fit or 1) - 1]
    timeline.write(fit, path, steps, args.force)
    clocks = _clocks(timeline.clock_error(fit))
    print(f"{fit.strategy}: {len(fit.ranks)} of {fit.size} ranks, {fit.seconds:.1f} s; {clocks}")
    print(f"trace: {path} (open it in https://ui.perfetto.dev)")
    return 0


def _clocks(error: float | None) -> str:
    if error is None:
        return "clocks as the hosts have set them, since the record has no measured offsets"
    return f"clocks alike to {1e6 * error:.0f} us"


def parse_steps(text: str) -> tuple[float, float]:
    """Return the first and the last step of `--steps`.

    Raises:
        ConfigError: if it is not a range of steps.

    Example:
        >>> parse_steps("200:300"), parse_steps("200:")
        ((200, 300), (200, inf))
    """
    first, colon, last = text.partition(":")
    try:
        found = (int(first or 1), int(last) if last else math.inf)
        if not colon or not 1 <= found[0] <= found[1]:
            raise ValueError
    except ValueError:
        raise ConfigError(f"--steps: expected FIRST:LAST, got {text!r}. Do: --steps 200:300") from None
    return found
