"""An all-reduce of Open MPI on slow links, with hvdx' setting for TCP and with Open MPI's own.

    python jobs/benchmarks/tcp.py                                    two and four hosts at 100mbit
    python jobs/benchmarks/tcp.py --hosts 4 --bandwidth 1gbit --megabytes 50

Open MPI imitates PUT over TCP, by default: the receiver asks for each piece of a large message. hvdx turns that off
before it starts MPI, unless OMPI_MCA_btl_tcp_flags is set. The hosts are those of `hvdx lab`. "Ideal" is the time of
2 (N - 1) / N of the bytes at the rate of the link.
"""

import argparse
import sys
from typing import Any

from hvdx.jobs.benchmarks import harness
from hvdx.report.table import render

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
    rows: list[dict[str, Any]] = []
    given = {"elements": round(options.megabytes * 1e6 / 4)}
    for hosts in options.hosts:
        ideal = 2 * (hosts - 1) / hosts * 8e6 * options.megabytes / harness.bits(options.bandwidth)
        ours = harness.launch(__file__, given, hosts, options.bandwidth).ranks[0]["seconds"]
        theirs = harness.launch(__file__, given, hosts, options.bandwidth, OMPI_MCA_btl_tcp_flags=_DEFAULT)
        default = theirs.ranks[0]["seconds"]
        rows.append({"hosts": hosts, "ideal": ideal, "hvdx": ours, "default": default, "ratio": ours / default})
        harness.write(options.json, {"bandwidth": options.bandwidth, "megabytes": options.megabytes, "rows": rows})
    cells = [[str(row["hosts"]), *(f"{row[key]:.3f}" for key in ("ideal", "hvdx", "default", "ratio"))] for row in rows]
    print(f"{options.megabytes:g} MB at {options.bandwidth}, seconds")
    print(render(cells, ["hosts", "ideal", "hvdx", "Open MPI's default", "ratio"]))
    return 0


def reduce(given: argparse.Namespace) -> dict[str, Any]:
    """Time the all-reduce; the fastest of five counts."""
    from hvdx.comm import mpi

    return {"seconds": mpi.all_reduce_seconds(given.elements, times=5)}


if __name__ == "__main__":
    sys.exit(main())
