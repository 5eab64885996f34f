"""An all-reduce of Open MPI on slow links, with hvdx' setting for TCP and with Open MPI's own.

    python jobs/benchmarks/tcp.py                                    two and four hosts at 100mbit
    python jobs/benchmarks/tcp.py --hosts 4 --bandwidth 1gbit --megabytes 50

Open MPI imitates PUT over TCP, by default: the receiver asks for each piece of a large message. hvdx turns that off
before it starts MPI, unless OMPI_MCA_btl_tcp_flags is set. The hosts are those of `hvdx lab`. "Ideal" is the time of
2 (N - 1) / N of the bytes at the rate of the link.
"""

import argparse
import sys

from hvdx.jobs.benchmarks import harness

_DEFAULT = "send,put,inplace,need-ack,need-csum,hetero-rdma"


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--hosts", type=harness.several(int), default="2,4", metavar="N,N,...", help="numbers of emulated hosts")
    add("--bandwidth", default="100mbit", metavar="RATE", help="bandwidth of the links")
    add("--megabytes", type=float, default=5.6, metavar="MB", help="size of the vector")
    return harness.run(parser, compare, reduce, argv)


def compare(options: argparse.Namespace) -> int:
    """Time the all-reduce with both settings, and print a table."""
    setting = {"elements": round(options.megabytes * 1e6 / 4)}

    def measure(case: harness.Row) -> harness.Row:
        hosts = case["hosts"]
        ideal = 2 * (hosts - 1) / hosts * 8e6 * options.megabytes / harness.bits(options.bandwidth)
        ours, theirs = (
            harness.launch(__file__, setting, hosts, options.bandwidth, env=env).ranks[0]["seconds"]
            for env in (None, {"OMPI_MCA_btl_tcp_flags": _DEFAULT})
        )
        return {"ideal": ideal, "hvdx": ours, "default": theirs, "ratio": ours / theirs}

    names = {"ideal": "ideal", "hvdx": "hvdx", "Open MPI's default": "default", "ratio": "ratio"}
    columns = [("hosts", lambda row: str(row["hosts"])), *(harness.figure(h, key, ".3f") for h, key in names.items())]
    print(f"{options.megabytes:g} MB at {options.bandwidth}, seconds")
    shared = {"bandwidth": options.bandwidth, "megabytes": options.megabytes}
    harness.run_cases(options.json, [{"hosts": hosts} for hosts in options.hosts], measure, columns, shared)
    return 0


def reduce(setting: argparse.Namespace) -> harness.Row:
    """Time the all-reduce; the fastest of five counts."""
    from hvdx.comm import mpi

    return {"seconds": mpi.all_reduce_seconds(setting.elements, times=5)}


if __name__ == "__main__":
    sys.exit(main())
