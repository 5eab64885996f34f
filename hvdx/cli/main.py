"""The `hvdx` command: find the sub-command, run it, and turn an HvdxError into one line and exit code 2."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from hvdx.cli.commands import COMMANDS
from hvdx.errors import HvdxError
from hvdx.log import Log
from hvdx.version import __version__

_log = Log(__name__)

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
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(words[0] if words else None)
    args = parser.parse_args(words)
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


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Build the parser of `hvdx`.

    Args:
        chosen: the command that is called, if it is known. Only its module is imported.
    """
    raw = argparse.RawDescriptionHelpFormatter
    listed = "\n".join(f"  {name:<15} {c.help}\n  {'':<15}   e.g.  {c.example}" for name, c in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="hvdx",
        usage="hvdx COMMAND [options]",
        description=_DESCRIPTION,
        epilog=f"commands:\n{listed}\n\n{_FIRST_STEPS}",
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"hvdx {__version__}")
    # help=SUPPRESS: the epilog lists the commands, with their examples.
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", help=argparse.SUPPRESS, prog="hvdx")
    for name, command in COMMANDS.items():
        if name != chosen:
            subparsers.add_parser(name)
            continue
        module = import_module(f"hvdx.cli.{name.replace('-', '_')}")
        sub = subparsers.add_parser(
            name,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=f"{getattr(module, 'DETAILS', '')}example:\n  {command.example}",
            formatter_class=raw,
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser
