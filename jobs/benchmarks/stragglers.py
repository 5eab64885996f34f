"""Time to a test accuracy without waiting for a slow worker: `Threshold` in step and not, and a parameter server.

    python jobs/benchmarks/stragglers.py                              four workers on this machine, a quarter of an hour
    python jobs/benchmarks/stragglers.py --bandwidth 100mbit          on emulated hosts of `hvdx lab`
    python jobs/benchmarks/stragglers.py --json stragglers.json       also write the figures
    python jobs/benchmarks/stragglers.py --ways step,inf --equal step,inf --steps 200

The training is that of `staleness.py`: a dense network on Fashion-MNIST, SGD with momentum; each worker sleeps for
20 ms in every step, and the last worker sleeps for nine times the duration of a step more. The first table shows the
ways with the slow worker (--ways), the second those without it (--equal). The first way of a table is the base of the
column "times sooner".
"""

import sys

from hvdx.jobs.benchmarks import staleness

#: Compared ways: name, strategy, and factor of the learning rate.
WAYS: dict[str, tuple[str, str, str]] = {
    "step": ("threshold, in step", "threshold", "1"),
    "inf": ("threshold, without waiting", "threshold:max_staleness=inf", "1"),
    "server": ("parameter server", "parameter_server:servers=colocated", "1"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    staleness.WAYS.update(WAYS)
    return staleness.main_with(argv, __doc__, "step,inf,server", "step,inf,server", 500)


if __name__ == "__main__":
    sys.exit(main())
