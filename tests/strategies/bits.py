"""Fifty steps under every strategy on virtual ranks, as digests: a change of the code must not change a bit of them.

After a change that is meant to change results, write the fixture again: `python -m tests.strategies.bits`.
"""

import hashlib
import json
import threading
from pathlib import Path

import numpy as np

from hvdx.comm import mesh
from hvdx.costs.model import Situation
from hvdx.costs.types import Link
from hvdx.simulation import ranks as simulated
from hvdx.strategies import AllReduce, Auto, ParameterAveraging, ParameterServer, StepInput, TensorSpec, Threshold
from hvdx.strategies.split import open_split
from tests.strategies.serving.ranks import all_fine, run
from tests.strategies.virtual import on_all, on_hosts

FIXTURE = Path(__file__).resolve().parent.parent / "fixtures" / "bits.json"
STEPS, RESTART, BAD = 50, 25, (1, 7)
SPECS = [TensorSpec(f"variable {i}", shape, 4) for i, shape in enumerate(((40, 30), (), (0, 3), (500,), (7,)))]
COUNTERS = ("steps", "skipped", "elements", "entries", "encoded", "messages", "sent", "received", "inside")

# Without a warm-up, so that a case of its own shows what that does.
DENSE = {"target_density": 0.05, "warmup": "none"}
SHARDED = DENSE | {"exchange": "sharded"}
THRESHOLD = {
    "fixed tau": {"tau": 0.03},
    "density": DENSE,
    "gradient": DENSE | {"placement": "gradient"},
    "falling": DENSE | {"warmup": "density:30"},
    "sharded": SHARDED,
    "sharded, fixed tau": {"tau": 0.03, "exchange": "sharded", "index_coding": "none"},
}
HOSTS = ("density", "sharded")
STALE = {"stale": {}, "stale, fixed tau": {"target_density": None, "tau": 0.03}}
SERVERS = {
    "servers": {},
    "servers, scaled": {"staleness": "scale", "codec": "threshold:0.1"},
}
IN_STEP = {"staleness": "bound", "max_staleness": 0, "codec": "threshold:0.1"}
GRAPH = {
    "all-reduce": AllReduce(),
    "all-reduce, fp16": AllReduce(compression="fp16"),
    "all-reduce, bf16, sum": AllReduce(compression="bf16", op="sum"),
    "averaging": ParameterAveraging(period=4),
}


def drawn(*seed, specs=SPECS):
    """Return heavy-tailed float32 arrays. They are made from whole numbers, so they are the same on every machine."""
    random = np.random.default_rng(seed)
    return [np.asarray(random.integers(-40, 41, s.shape).astype(np.float32) ** 3 * np.float32(2**-20)) for s in specs]


def sample_of(rank, step):
    """Return a sample of gradients, in float16 and with few bits, so that its sums have no rounding."""
    return [np.asarray(np.random.default_rng([9, rank, step]).integers(-8, 9, 24) / 8, np.float16)]


def step_of(exchange, tensors, finite=True, sample=None):
    """Take a step on the host."""
    return exchange.take(StepInput(tensors, finite, sample=sample))


class Digest:
    """Digest of arrays, and of which of them are None."""

    def __init__(self):
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, arrays):
        """Add arrays, or None."""
        for array in arrays if arrays is not None else [None]:
            self._hash.update(b"none" if array is None else np.ascontiguousarray(array).tobytes())
        return self

    def __str__(self):
        return self._hash.hexdigest()


def stated(exchange, counted=COUNTERS):
    """Return a digest of the state and the residuals of an exchange, and some of its counters."""
    state = exchange.state_dict()
    names = Digest().add([np.frombuffer(" ".join(sorted(state)).encode(), np.uint8)])
    digest = names.add([state[name] for name in sorted(state)]).add(exchange.residuals)
    return [str(digest), *(getattr(exchange.telemetry, name) for name in counted)]


def summary(results):
    """Return the row of a case: one digest of results if all ranks have the same, and the state of each rank."""
    digests = [str(digest) for digest, _ in results]
    return {"results": digests[0] if len(set(digests)) == 1 else digests, "ranks": [state for _, state in results]}


def in_common_steps(strategy, sample=False, split=0):
    """Return a training on one rank; half-way it goes on with a new exchange, from the saved state of the first."""

    def opened(comm, specs):
        if not split:
            return strategy.open(comm, specs)
        return open_split(strategy, comm, comm.mesh.peers, specs, [False, True, False, True, False], 0.9)

    def work(comm):
        specs = SPECS
        if split:
            comm.mesh = mesh.make(comm, split)
        exchange, digest = opened(comm, specs), Digest()
        for t in range(STEPS):
            if t == RESTART:
                state = {name: np.array(value) for name, value in exchange.state_dict().items()}
                first = stated(exchange)
                exchange = opened(comm, specs)
                exchange.load_state_dict(state)
            own_sample = sample_of(comm.rank, t) if sample else None
            digest.add(step_of(exchange, drawn(comm.rank, t), (comm.rank, t) != BAD, own_sample))
        digest.add(exchange.flush())
        return digest, [first, stated(exchange)]

    return work


def in_turns(strategy, size, servers=0):
    """Return the row of a training in which the ranks take their steps one after the other."""
    turn = threading.Barrier(size)

    def work(comm):
        exchange, digest = strategy.open(comm, SPECS), Digest()
        weights = [np.zeros(s.shape, np.float32) for s in SPECS]
        exchange.begin(weights)
        for t in range(STEPS):
            for rank in range(size):
                turn.wait(20)
                if rank == comm.rank:
                    wanted = [w + u for w, u in zip(weights, drawn(comm.rank, t), strict=True)]
                    weights = [w.copy() for w in step_of(exchange, wanted, (rank, t) != BAD, sample_of(rank, t))]
                    digest.add(weights)
        turn.wait(20)
        digest.add(exchange.flush())
        return digest, stated(exchange, ("steps", "skipped", "elements", "entries", "messages"))

    return summary(all_fine(run(size, work, servers)))


def in_step(strategy, size, split=0, servers=0):
    """Return the row of a training with servers that apply the updates of all workers together."""

    def work(comm):
        if split:
            comm.mesh = mesh.make(comm, split)
            exchange = open_split(strategy, comm, comm.mesh.peers, SPECS, [False, True, False, True, False])
        else:
            exchange = strategy.open(comm, SPECS)
        digest, weights = Digest(), [np.zeros(s.shape, np.float32) for s in SPECS]
        exchange.begin(weights)
        for t in range(STEPS):
            weights = exchange.step([w + u for w, u in zip(weights, drawn(comm.rank, t), strict=True)])
            digest.add(weights)
        digest.add(exchange.flush())
        return digest, stated(exchange, ("steps", "skipped", "elements", "messages"))

    return summary(all_fine(run(size, work, servers)))


def in_graph(strategy, size):
    """Return the row of a training with exchanges of the graph, on arrays of NumPy."""
    comms = simulated.world(Situation(size, (1,), 0.0, Link(0.0, 1e9)), np.ones(size), 1.0, size, lambda: 0.0)

    def work(comm):
        exchange, digest = strategy.open(comm, SPECS, "bits"), Digest()
        share = {np.dtype(np.float32): np.float32(1 + comm.rank)}
        for t in range(STEPS):
            tensors = drawn(comm.rank, t)
            if strategy.placement == "weights":
                digest.add(exchange.mean([x * share[x.dtype] for x in tensors], share))
            else:
                digest.add(exchange.step(tensors))
        return digest, exchange.sent

    return summary(simulated.on_all(comms, work))


def cases(size):
    """Return {name: function without arguments that returns the row} of all cases on a number of ranks."""
    found = {}
    for name, options in THRESHOLD.items():
        found[name] = lambda o=options: summary(on_all(size, in_common_steps(Threshold(**o))))
    for name in ("density", "sharded"):
        work = in_common_steps(Threshold(**THRESHOLD[name]), sample=True)
        found[f"{name}, Adam"] = lambda w=work: summary(on_all(size, w))
    for name in HOSTS:
        hosts = "aabb"[:size]
        work = in_common_steps(Threshold(**THRESHOLD[name], local="dense"), sample=True)
        found[f"hosts, {name}"] = lambda w=work, h=hosts: summary(on_hosts(h, w))
    for name in ("fixed tau", "gradient"):
        work = in_common_steps(Threshold(**THRESHOLD[name]), split=2)
        found[f"split, {name}"] = lambda w=work: summary(on_all(size, w))
    for name, options in STALE.items():
        strategy = Threshold(**{"target_density": 0.05, "max_staleness": "inf", "warmup": "none"} | options)
        found[name] = lambda s=strategy: in_turns(s, size)
    for name, options in SERVERS.items():
        found[name] = lambda o=options: in_turns(ParameterServer("colocated", **o), size)
    found["servers of their own"] = lambda: in_turns(ParameterServer(1), size, 1)
    found["servers, in step"] = lambda: in_step(ParameterServer("colocated", aggregate=size, **IN_STEP), size)
    found["servers, split"] = lambda: in_step(ParameterServer("colocated", aggregate=size, **IN_STEP), size, 2)
    for name, strategy in GRAPH.items():
        found[name] = lambda s=strategy: in_graph(s, size)
    found["auto"] = lambda: summary(on_all(size, _trial))
    return found


def _trial(comm):
    exchange, digest = Auto().open(comm, SPECS), Digest()
    for t in range(STEPS):
        digest.add(exchange.step(drawn(comm.rank, t)))
    return digest, exchange.telemetry.sent


if __name__ == "__main__":
    from hvdx.strategies.threshold.session_mailbox import SessionMailbox

    SessionMailbox.start = lambda self, session: None
    rows = {f"{name}, {size} ranks": case() for size in (2, 4) for name, case in cases(size).items()}
    FIXTURE.write_text(
        "{\n"
        + ",\n".join(f'"{name}": {json.dumps(row, separators=(",", ":"))}' for name, row in rows.items())
        + "\n}\n"
    )
