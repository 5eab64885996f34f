"""`hvdx bench`: sizes and speeds on this machine, compared with the best possible ones."""

import argparse
from importlib import import_module

from hvdx.errors import ConfigError

DETAILS = """\
Exit code 0: every goal was met; 1: some were missed (the last lines name them).

"""

#: Name of each benchmark, and its module, which has add_arguments(parser) and run(args) -> exit code.
BENCHMARKS = {"wire": "hvdx.jobs.benchmarks.wire", "kernels": "hvdx.jobs.benchmarks.kernels"}
_SUMMARIES = {
    "wire": "bits per entry on the wire, compared with entropy, Elias-Fano, zstd and plain int32",
    "kernels": "speed of encoding and decoding, compared with np.add, on one core and on all",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks. Each benchmark declares its own options in `run`."""
    listed = "\n".join(f"  {name:<9} {summary}" for name, summary in _SUMMARIES.items())
    parser.usage = "hvdx bench {wire,kernels} [options]"
    parser.epilog = (
        f"benchmarks:\n{listed}\n\n`hvdx bench wire --help` shows the options of one benchmark.\n\n{parser.epilog}"
    )
    parser.add_argument("benchmark", choices=list(BENCHMARKS), help="the benchmark to run")
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
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE; - prints only JSON")
    module.add_arguments(parser)
    return module.run(parser.parse_args(args.options))
