"""Stress test: one of four ranks exits, fails, dies or is stopped at a random step, many times.

    python -m tests.deaths [--times 10] [--strategies NAME ...] [--ways NAME ...] [--seed 0]

For each strategy and each way it prints the number of jobs that named the right rank and ended in time (or continued,
if the rank was stopped for a while), and the longest time. It takes hours; the suite has a case of each (test_exits,
test_failures, test_stalls).
"""

import argparse
import itertools
import random
import re
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from tests.launch import Run, run

RANKS, EPOCHS, STEPS = 4, 4, 40
START = 120  # seconds at most until training has begun
SLEEP, WARNING = 90, 60  # seconds for which a rank is stopped, and until the others must warn
SOON = 15  # seconds at most from the event to the end of the job

CODE = """
import os, signal, subprocess, sys, time
import numpy as np, keras
import hvdx, hvdx.keras
strategy, way, who, step = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
hvdx.init()
taken = 0
class Event(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        global taken
        taken += 1
        time.sleep(0.01)
        if taken == step + 1 and hvdx.rank() == who:
            print("ON", time.time(), flush=True)
        if taken != step or hvdx.rank() != who:
            return
        print("READY", time.time(), flush=True)
        if way == "exit":
            sys.exit(3)
        elif way == "exception":
            raise ValueError("no such image")
        elif way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            subprocess.Popen(["sh", "-c", f"sleep {way.split('-')[1]}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            print("AWAKE", time.time(), flush=True)
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
random = np.random.default_rng(0)
x, y = random.normal(size=(@SAMPLES@, 20)).astype("f4"), random.normal(size=(@SAMPLES@, 1)).astype("f4")
model.fit(hvdx.shard((x, y), 4), shuffle=False, epochs=@EPOCHS@, verbose=0,
          callbacks=[hvdx.keras.Distribute(strategy), Event()])
print("TRAINED", flush=True)
""".replace("@SAMPLES@", str(RANKS * STEPS * 4)).replace("@EPOCHS@", str(EPOCHS))

STRATEGIES = (
    "all_reduce",
    "threshold:tau=0.01",
    "parameter_averaging:period=4",
    "parameter_server:servers=colocated",
)


class Outcome(NamedTuple):
    """Outcome of one job.

    Attributes:
        problem: description of the failure; "" for none.
        seconds: from the event to the end of the job; if the rank was stopped, from its waking to its next step.
    """

    problem: str
    seconds: float


def _dies(done: Run, rank: int, named: str, code: int | None) -> str:
    if done.code in (0, None) or (code is not None and done.code != code):
        return f"exit status {done.code}"
    # The launcher breaks its message into lines.
    return "" if re.search(named.format(rank=rank), " ".join(done.out.split())) else "not named"


def _wakes(done: Run, rank: int) -> str:
    if done.code != 0 or done.out.count("TRAINED") < RANKS:
        return f"did not continue: exit status {done.code}"
    return (
        "" if re.search(rf"no progress for .*\n(.*\n)*? *rank {rank} \S+: does not answer", done.out) else "not named"
    )


WAYS: dict[str, Callable[[Run, int], str]] = {
    "exit": lambda done, rank: _dies(done, rank, r"rank {rank} of 4 on \S+ ended: sys.exit\(3\)", 3),
    "exception": lambda done, rank: _dies(done, rank, "rank {rank} of 4 on .* failed; .* no such image", 1),
    "kill": lambda done, rank: _dies(done, rank, r"rank {rank} .{{0,40}}on node \S+ .{{0,40}}signal 9", None),
    f"stop-{SLEEP}": _wakes,
}


def job(strategy: str, way: str, rank: int, step: int) -> Outcome:
    """Run one job and return its outcome."""
    program = ["-c", CODE, strategy, way, str(rank), str(step)]
    done = run(RANKS, program, START + SLEEP + SOON + 60, {"HVDX_STALL_WARNING": str(WARNING)})
    ended = time.time()
    if not done.ready:
        return Outcome(f"did not begin: {done}", 0.0)
    seconds = ended - done.ready[0]
    woke = [float(when) for when in re.findall(r"^(?:AWAKE|ON) (\S+)", done.out, re.MULTILINE)]
    if len(woke) == 2:
        seconds = woke[1] - woke[0]
    problem = WAYS[way](done, rank)
    if not problem and seconds > SOON:
        problem = f"{seconds:.0f} s"
    return Outcome(f"{problem}: {done}" if problem else "", seconds)


def main() -> int:
    """Run all jobs; return 1 if any had a problem."""
    parser = argparse.ArgumentParser(prog="python -m tests.deaths", description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=10, help="jobs of each kind; 10 by default")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, help="all four by default")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="all by default")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random ranks and steps")
    args = parser.parse_args()
    draw, wrong = random.Random(args.seed), 0
    for strategy, way in itertools.product(args.strategies, args.ways):
        outcomes = []
        for _ in range(args.times):
            rank, step = draw.randrange(RANKS), draw.randint(1, EPOCHS * STEPS * 3 // 4)
            outcomes.append(job(strategy, way, rank, step))
            if outcomes[-1].problem:
                print(f"{strategy}, {way}, rank {rank}, step {step}: {outcomes[-1].problem}", flush=True)
        right = sum(not outcome.problem for outcome in outcomes)
        wrong += len(outcomes) - right
        longest = max(outcome.seconds for outcome in outcomes)
        print(f"{strategy:36} {way:10} {right} of {len(outcomes)} right, longest {longest:.1f} s", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
