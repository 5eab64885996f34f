"""`hvdx bench`: what the parts cost on this machine, against what they could cost at best."""

import argparse
from importlib import import_module

from hvdx.errors import ConfigError

NAME = "bench"
HELP = "measure the codec: bits on the wire against entropy, kernels against memory speed"
EXAMPLE = "hvdx bench wire"
DETAILS = """\
Exit code 0: all goals that the figures have were met; 1: some were not (the last lines say which).

"""

#: What can be measured, and the module that does it: add_arguments(parser), run(args) -> exit code.
BENCHMARKS = {"wire": "hvdx.jobs.benchmarks.wire", "kernels": "hvdx.jobs.benchmarks.kernels"}
_SUMMARIES = {
    "wire": "bits an entry on the wire, against entropy, Elias-Fano, zstd and plain int32",
    "kernels": "speed of encoding and decoding, against np.add, on one core and on all",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be measured; each benchmark declares its own options once it is chosen."""
    listed = "\n".join(f"  {name:<9} {summary}" for name, summary in _SUMMARIES.items())
    parser.usage = "hvdx bench {wire,kernels} [options]"
    parser.epilog = f"benchmarks:\n{listed}\n\n`hvdx bench wire --help` tells the options of one.\n\n{parser.epilog}"
    parser.add_argument("benchmark", choices=list(BENCHMARKS), help="what to measure")
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run one benchmark."""
    try:
        module = import_module(BENCHMARKS[args.benchmark])
    except ImportError as error:
        raise ConfigError(f"bench {args.benchmark}: {error}. Install hvdx with its dependencies.") from error
    parser = argparse.ArgumentParser(
        prog=f"hvdx bench {args.benchmark}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file too; - for standard output alone")
    module.add_arguments(parser)
    return module.run(parser.parse_args(args.options))
