"""Measurement of a link of the lab: a ping-pong and a stream between two hosts, compared with the request."""

import sys

# Accepted ratios of measured to requested rate. Headers of Ethernet, IP and TCP take 5 %.
_LOW, _HIGH = 0.85, 1.02
_LATE = 0.01  # seconds of accepted extra latency; the machine's own is about 0.05 ms, more if its cores are busy

_PROGRAM = f"""
import sys, time
from mpi4py import MPI

rate, delay = float(sys.argv[1]), float(sys.argv[2])
comm = MPI.COMM_WORLD
rank = comm.Get_rank()


def seconds(sizes, there, back):
    # Median time from rank 0's send to the answer of rank 1.
    out, home, taken = bytearray(there), bytearray(back), []
    for _ in range(sizes):
        start = time.perf_counter()
        if rank == 0:
            comm.Send(out, 1)
            comm.Recv(home, 1)
        elif rank == 1:
            comm.Recv(out, 0)
            comm.Send(home, 0)
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2]


seconds(20, 8, 8)
ping = seconds(200 if not delay else 20, 8, 8) / 2
amount = int(min(max(rate / 8, 100_000), 250_000_000)) if rate else 250_000_000
stream = seconds(3, amount, 8)
small = seconds(9, 30_000, 8)
code = 0
if rank == 0:
    reached = 8 * amount / stream
    print(f"latency     {{ping * 1e3:.3f}} ms, half a round trip of 8 bytes; requested: {{delay * 1e3:g}} ms added")
    asked = f"{{reached / rate:.0%}} of the requested {{rate / 1e6:g}} Mbit/s" if rate else "no limit requested"
    print(f"bandwidth   {{reached / 1e6:.1f}} Mbit/s, {{amount / 1e6:g}} MB from host1 to host2; {{asked}}")
    ideal = f"; {{240_000 / rate * 1e3 + 2 * ping * 1e3:.3f}} ms at that rate" if rate else ""
    print(f"30 kB       {{small * 1e3:.3f}} ms there and 8 bytes back{{ideal}}")
    if rate and not {_LOW} <= reached / rate <= {_HIGH}:
        print("The rate differs from the requested one: the machine is too slow for it, or too busy.")
        code = 1
    if not delay <= ping <= delay + {_LATE}:
        print("The latency differs from the requested one: the machine is too busy.")
        code = 1
sys.exit(comm.bcast(code))
"""


def command(rate: int | None, delay: float) -> list[str]:
    """Return the command of each rank. Ranks 0 and 1 measure; the others wait.

    Args:
        rate: requested bits per second; None for no limit.
        delay: requested seconds of added latency.
    """
    return [sys.executable, "-c", _PROGRAM, str(rate or 0), str(delay)]
