"""The `hvdx` command: find the sub-command, run it, and turn an HvdxError into one line and exit code 2."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from hvdx.errors import HvdxError
from hvdx.log import Log
from hvdx.version import __version__

_log = Log(__name__)

#: The modules of the sub-commands, in the order of the help text. Each has NAME, HELP, EXAMPLE,
#: add_arguments(parser) and run(args) -> exit code, and perhaps DETAILS; it imports nothing slow at its top.
COMMANDS = (
    "hvdx.cli.run",
    "hvdx.cli.doctor",
    "hvdx.cli.build_horovod",
    "hvdx.cli.build_kernels",
    "hvdx.cli.advise",
    "hvdx.cli.simulate",
    "hvdx.cli.job",
    "hvdx.cli.bench",
    "hvdx.cli.lab",
    "hvdx.cli.compare",
    "hvdx.cli.report",
    "hvdx.cli.trace",
    "hvdx.cli.average",
)

_DESCRIPTION = """\
Train Keras 3 models on several machines: add a callback to a script, and choose how workers combine their work.
"""

_FIRST_STEPS = """\
first steps:
  hvdx doctor                     check the installation
  hvdx run -n 2 python train.py   run a script on two workers
  hvdx build-kernels              compile the kernels of Threshold, once per machine
  hvdx build-horovod              optional: build Horovod, for AllReduce and ParameterAveraging

`hvdx COMMAND --help` explains one command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `hvdx` command.

    Args:
        argv: the words after `hvdx`; those of this process by default.

    Returns:
        The exit code: 0 for success, 1 for a negative result (a check failed, a goal was missed), 2 for an HvdxError,
        130 for Ctrl-C; `run` and `lab` return the code of the job.

    Example:
        >>> main(["--version"])  # doctest: +SKIP
        hvdx 0.1.0
    """
    _open_closed()
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return args.run(args)
    except HvdxError as error:
        _log.error(str(error))
        return 2
    except KeyboardInterrupt:
        _log.error("interrupted")
        return 130


def _open_closed() -> None:
    """Open /dev/null in place of closed standard streams (`>&-`), whose numbers files and pipes would get."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The lowest free number. mpirun, which may replace this process, and its ranks inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `hvdx` with the parsers of all commands."""
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
    # help=SUPPRESS: the epilog lists the commands, with their examples.
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
