"""The `hvdx` command: finds the sub-command, runs it, turns an HvdxError into one line and exit code 2."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from hvdx.errors import HvdxError
from hvdx.version import __version__

#: The modules of the sub-commands, in the order in which help lists them. Each has NAME, HELP,
#: EXAMPLE, add_arguments(parser) and run(args) -> exit code, and imports nothing heavy at its top.
COMMANDS = (
    "hvdx.cli.run",
    "hvdx.cli.doctor",
    "hvdx.cli.build_horovod",
    "hvdx.cli.build_kernels",
    "hvdx.cli.job",
    "hvdx.cli.bench",
    "hvdx.cli.lab",
    "hvdx.cli.average",
)

_DESCRIPTION = """\
Train Keras 3 models on several machines: one added line in a script, several ways to combine the work.
"""

_FIRST_STEPS = """\
first steps:
  hvdx doctor                     is everything in place?
  hvdx run -n 2 python train.py   the same script on two workers
  hvdx build-kernels              once per machine, for Threshold
  hvdx build-horovod              optional, for AllReduce and ParameterAveraging

`hvdx COMMAND --help` tells all about one command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `hvdx` command.

    Args:
        argv: the words after `hvdx`; those of this process by default.

    Returns:
        The exit code: 0 for success, 1 for "it ran and the answer is no", 2 for an error in the call.

    Example:
        >>> main(["--version"])  # doctest: +SKIP
        hvdx 0.1.0
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return args.run(args)
    except HvdxError as error:
        print(f"hvdx: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hvdx: interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Put the parsers of all commands together."""
    modules = [import_module(name) for name in COMMANDS]
    raw = argparse.RawDescriptionHelpFormatter
    commands = "\n".join(f"  {m.NAME:<15} {m.HELP}\n  {'':<15}   e.g.  {m.EXAMPLE}" for m in modules)
    parser = argparse.ArgumentParser(
        prog="hvdx",
        usage="hvdx COMMAND [options]",
        description=_DESCRIPTION,
        epilog=f"commands:\n{commands}\n\n{_FIRST_STEPS}",
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"hvdx {__version__}")
    # The epilog lists the commands with their examples, which argparse's own listing cannot.
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", help=argparse.SUPPRESS, prog="hvdx")
    for module in modules:
        details = getattr(module, "DETAILS", "")
        sub = subparsers.add_parser(
            module.NAME,
            description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
            epilog=f"{details}example:\n  {module.EXAMPLE}",
            formatter_class=raw,
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser
