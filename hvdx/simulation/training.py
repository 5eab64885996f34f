"""A simulated training: every rank trains its replica under one strategy, by its virtual clock."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from hvdx.comm import Channel, Comm
from hvdx.costs.model import Situation
from hvdx.costs.speeds import Balancer
from hvdx.errors import ConfigError
from hvdx.simulation.ranks import SimulatedComm, on_all, world
from hvdx.simulation.virtual_clock import RankClock
from hvdx.simulation.workloads import Replica, Workload
from hvdx.strategies import StepInput, Strategy, TensorSpec
from hvdx.strategies.contract import EACH_STEP

# Objects that belong to others, or to the simulation.
_OUTSIDE = (
    *(Comm, Channel, RankClock, Executor, Future, threading.Thread),
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType),
)


def bytes_held(*objects: Any) -> int:
    """Return the bytes of all NumPy arrays that can be reached from some objects, each counted once.

    Communicators, functions and modules are left out.

    Example:
        >>> vector = np.zeros(10, np.float32)
        >>> bytes_held({"whole": vector, "half": vector[:5]}, [np.zeros(3)])
        64
    """
    waiting, seen, total = deque(objects), set(), 0
    while waiting:
        item = waiting.popleft()
        while isinstance(item, np.ndarray) and isinstance(item.base, np.ndarray):
            item = item.base
        if id(item) in seen or isinstance(item, _OUTSIDE):
            continue
        seen.add(id(item))
        if isinstance(item, np.ndarray):
            total += item.nbytes
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple | set | deque):
            waiting.extend(item)
        else:
            waiting.extend(getattr(item, "__dict__", {}).values())
    return total


#: Parts of a step, in their order.
PARTS = ("computing", "waiting", "encoding", "network", "decoding", "copying")
# Share of the steps that is left out of the means: in the first ones the codec finds tau, and a density settles.
_LEFT_OUT = 1 / 3
# Largest number of points of a curve of losses.
_POINTS = 50
# Bytes of an element in weights, gradients and momenta together.
_OWN = 12.0
# Step of a replica: takes the replica, its rows, the exchange, the clock, and the seconds of computing.
_Step = Callable[[Replica, int, Any, RankClock, np.ndarray], None]


@dataclass(frozen=True)
class Setting:
    """Ranks, their cores, and the length of a training.

    Attributes:
        situation: number of workers, workers on a host, link, machine, engine, and seconds of computing in a step.
        steps: number of steps.
        slow: factor on the time of all work of a rank, by rank; 1 for the others.
        jitter: standard deviation of the logarithm of the computing time of a step; its mean stays the same.
        balance: whether strategies in step divide the rows of each step by the speeds of the workers.
        core_speed: speed of the ranks' cores, relative to this machine's; infinity for work that takes no time.
        running: number of workers that should run, while the others repeat them; None if all run.
        seed: seed of the jitter.
        timer: returns the seconds of work of the calling thread.
        limit: real seconds after which a training ends early, if it exchanges in every step.
    """

    situation: Situation
    steps: int
    slow: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    balance: bool = False
    core_speed: float = 1.0
    running: int | None = None
    seed: int = 0
    timer: Callable[[], float] = time.thread_time
    limit: float = math.inf

    @property
    def running_hosts(self) -> int:
        """Number of hosts whose workers run."""
        hosts, per_host = -(-self.situation.workers // self.situation.per_host), self.situation.per_host
        if self.running is None:
            return hosts
        # With one host of one worker, nothing would be exchanged between workers that run.
        return min(max(-(-self.running // per_host), 1 if per_host > 1 else 2), hosts)


@dataclass(frozen=True)
class Outcome:
    """Figures of a simulated training.

    Attributes:
        seconds: virtual seconds of a step, without the first steps.
        parts: virtual seconds of each of `PARTS` in a step, means over the workers that ran.
        sent, received: bytes of a worker in a step.
        crossing: bytes that a worker sends to other hosts in a step.
        message: bytes of the message in which a worker encodes its update, in a step; 0 for dense tensors.
        memory: bytes on a worker: weights, gradients, optimiser, arrays of the exchange and received messages.
        losses: pairs (virtual seconds, loss of worker 0 on held-out data); empty if some workers repeat others.
        total: virtual seconds of all steps.
        taken: number of steps; fewer than in the setting if the limit was reached.
        running: number of workers that ran.
        steps: number of steps that the means are of.
        rows: rows of each worker in the last step.
    """

    seconds: float
    parts: dict[str, float]
    sent: float
    received: float
    crossing: float
    message: float
    memory: float
    losses: list[tuple[float, float]]
    total: float
    taken: int
    running: int
    steps: int
    rows: list[int]


def simulate(strategy: Strategy, setting: Setting, workload: Workload) -> Outcome:
    """Train under a strategy, and return the figures.

    Args:
        strategy: the strategy. Its codec has one thread on each rank.

    Raises:
        ConfigError: if the strategy cannot be simulated.

    Example:
        >>> from hvdx.simulation.workloads import Made
        >>> from hvdx.strategies import AllReduce
        >>> from hvdx.costs.types import Link
        >>> situation = Situation(2, (1000,), 0.01, Link(0.0, 1e6), engine="mpi")
        >>> outcome = simulate(AllReduce(), Setting(situation, 8, core_speed=float("inf")), Made(1000))
        >>> outcome.sent, round(1e3 * outcome.parts["computing"])
        (4000.0, 10)
    """
    strategy = check(strategy)
    tensors = tuple(s.elements for s in workload.specs)
    situation = replace(setting.situation.with_engine(strategy.engine), tensors=tensors)
    slow = np.ones(situation.workers)
    for rank, factor in setting.slow.items():
        if rank < situation.workers:
            slow[rank] = factor
    plan = _Plan(strategy, workload, situation, setting, slow)
    ranks = world(situation, slow, setting.core_speed, setting.running_hosts, setting.timer, plan.rarely)
    return _outcome(plan, on_all(ranks, lambda comm: _train(comm, plan)))


def check(strategy: Strategy) -> Strategy:
    """Return the strategy with one thread, whose time the simulation measures.

    Raises:
        ConfigError: if its ranks have no common step, it has servers, another strategy replaces it, or it was told to
            use several threads.
    """
    why = ""
    if strategy.asynchronous or strategy.dedicated:
        why = "its workers do not exchange in a common step"
    elif strategy.provisional:
        why = "it measures real steps, and then trains with another strategy"
    if why:
        raise ConfigError(
            f"simulate: {strategy.name} cannot be simulated: {why}. Leave it out; `hvdx compare` measures it."
        )
    return strategy.on_one_thread("a simulation, which times the work of one; --core-speed gives faster workers")


class _Plan:
    """State that all ranks of one training share.

    Attributes:
        rarely: whether most steps have no exchange.
        copying: seconds of a step in which TensorFlow copies the tensors of an exchange on the host, as predicted.
        balances: whether the rows of the workers follow their speeds.
        computing: float64[steps, workers], seconds of each step with an even share of the rows.
        fixed: seconds of each step whatever its rows, `copying` included.
        last: number of steps that are taken.
    """

    def __init__(
        self, strategy: Strategy, workload: Workload, situation: Situation, setting: Setting, slow: np.ndarray
    ) -> None:
        self.strategy, self.workload, self.situation, self.setting = strategy, workload, situation, setting
        self.predicted = strategy.predict(situation)
        self.rarely = strategy.schedule[-1][1] > 1
        on_host = strategy.runs == "host" and self.predicted is not None
        self.copying = self.predicted.terms.get("copying", 0.0) if on_host and self.predicted else 0.0
        spread = np.random.default_rng(setting.seed).standard_normal((setting.steps, situation.workers))
        self.computing = situation.computing * np.exp(setting.jitter * spread - setting.jitter**2 / 2)
        self.fixed = self.copying + (situation.polling(self.rarely) if strategy.runs == "graph" else 0.0)
        self.slow = slow
        self.balances = setting.balance and strategy.schedule == EACH_STEP and strategy.weighs
        self.last, self._begin = setting.steps, time.monotonic()

    def seconds(self, step: int, rows: "_Rows") -> np.ndarray:
        """Return the seconds of computing of a step, float64[members]."""
        share = np.array(rows.latest)[rows.mine] / self.workload.batch
        return (self.computing[step, rows.mine] * share + self.fixed) * self.slow[rows.mine]

    def ended(self, step: int) -> None:
        """Note that rank 0 has ended a step. After the limit, the next step is the last one.

        Rank 0 still holds the lock, so no rank has ended the next step, which takes an exchange with rank 0.
        """
        if not self.rarely and time.monotonic() - self._begin > self.setting.limit:
            self.last = min(self.last, step + 2)

    @property
    def buffers(self) -> float:
        """Bytes of the buffers of an exchange in the graph, as predicted; 0 on the host, where they are measured."""
        if self.strategy.runs == "host" or self.predicted is None:
            return 0.0
        own = ("weights", "gradients", "optimiser")
        return sum(size for name, size in self.predicted.memory.items() if name not in own)


class _Log:
    """Figures of a rank at the end of each step, as totals since the start.

    Attributes:
        ends: virtual seconds, the latest of the rank and those that repeat it.
        parts: seconds of each of `PARTS`.
        bytes: bytes sent, received, sent to other hosts, and encoded.
        losses: pairs (virtual seconds, loss).
        memory: bytes of the exchange.
        rows: rows of each worker in the end.
    """

    def __init__(self, steps: int) -> None:
        self.ends, self.parts, self.bytes = (
            np.zeros(steps + 1),
            np.zeros((steps + 1, len(PARTS))),
            np.zeros((steps + 1, 4)),
        )
        self.losses: list[tuple[float, float]] = []
        self.memory = 0.0
        self.rows: list[int] = []

    def end(self, step: int, comm: SimulatedComm, exchange: Any, copying: float) -> None:
        """Record the end of a step."""
        costs, counts, traffic = comm.clock.costs, getattr(exchange, "telemetry", None), comm.traffic
        encoding, decoding = (counts.encoding, counts.decoding) if counts is not None else (0.0, 0.0)
        copied = copying * (step + 1)
        rest = max(costs.work - encoding - decoding, 0.0) + copied
        self.ends[step + 1] = comm.clock.times.max()
        self.parts[step + 1] = costs.computing - copied, costs.waiting, encoding, costs.network, decoding, rest
        messages = 0.0 if counts is None else counts.messages
        self.bytes[step + 1] = traffic.sent, traffic.received, traffic.crossing, messages


class _Rows:
    """Rows of each worker, which hvdx's own balancers divide; those of workers that repeat this one are here, too.

    Attributes:
        mine: bool[workers], this worker and those that repeat it.
        latest: rows of each worker.
    """

    def __init__(self, comm: SimulatedComm, batch: int) -> None:
        self._comm = comm
        self.mine = comm.group.repeats == comm.group.running.index(comm.rank)
        self.latest, self._changed = [batch] * comm.size, False
        self._balancers = [Balancer(batch * comm.size) for _ in range(self.mine.sum())]

    def follow(self, computing: np.ndarray, step: float) -> None:
        """Add a step, its seconds of computing and in all; now and then, divide the rows anew. Collective."""
        for balancer, rows, seconds in zip(self._balancers, np.array(self.latest)[self.mine], computing, strict=True):
            balancer.add(float(rows), float(seconds), step)
        if not self._balancers[0].is_due:
            return
        # The work since the last exchange is not that of an exchange.
        self._comm.clock.resume()
        everyone = self._comm.all_gather_object([b.tell() for b in self._balancers], "the speeds of the ranks")
        told = [theirs[place] for theirs, place in zip(everyone, self._comm.group.turned, strict=True)]
        wanted = self._balancers[0].decide(told, self.latest, not self._changed)
        if wanted is not None:
            self.latest, self._changed = wanted, True


def _train(comm: SimulatedComm, plan: _Plan) -> _Log:
    strategy, replica, mine = plan.strategy, plan.workload.replica(comm.rank), comm.clock
    specs = list(plan.workload.specs)
    if strategy.placement == "weights" and not strategy.rank_local_state:
        specs += [TensorSpec(f"momentum of {s.name}", s.shape, s.itemsize) for s in specs]
    exchange = strategy.open(comm, specs, "simulation")
    step_of = _step_of(strategy, len(specs))
    group, log, steps = comm.group, _Log(plan.setting.steps), plan.setting.steps
    rows = _Rows(comm, plan.workload.batch)
    watched = comm.rank == 0 and len(group.running) == comm.size
    every = -(-steps // _POINTS)
    comm.start()
    for step in range(steps):
        if step >= plan.last:
            break
        begin, computing = float(mine.times[0]), plan.seconds(step, rows)
        step_of(replica, rows.latest[comm.rank], exchange, mine, computing)
        if plan.balances:
            rows.follow(computing, float(mine.times[0]) - begin)
        log.end(step, comm, exchange, plan.copying)
        loss = replica.loss() if watched and ((step + 1) % every == 0 or step + 1 == steps) else None
        if loss is not None:
            log.losses.append((float(mine.times[0]), loss))
        if comm.rank == 0:
            plan.ended(step)
    mine.resume()
    exchange.close()
    log.rows = rows.latest
    log.memory = bytes_held(exchange) + (comm.traffic.buffer if strategy.runs == "host" else 0.0)
    return log


def _step_of(strategy: Strategy, tensors: int) -> _Step:
    """Return the step of a replica; of `tensors` arrays, if it exchanges weights."""
    if strategy.placement == "gradient":
        return _with_gradients
    return _with_updates() if strategy.placement == "update" else _with_weights(strategy, tensors)


def _with_gradients(replica: Replica, rows: int, exchange: Any, mine: RankClock, seconds: np.ndarray) -> None:
    gradients = replica.gradients(rows)
    mine.compute(seconds)
    mean = exchange.step(gradients)
    mine.count_work()
    replica.add(replica.updates(mean))


def _with_updates() -> _Step:
    """Return the step of a strategy that exchanges updates, or sums of them if its exchange asks for a period."""
    before: list[np.ndarray] = []
    changes: list[np.ndarray] = []
    since = 0

    def step(replica: Replica, rows: int, exchange: Any, mine: RankClock, seconds: np.ndarray) -> None:
        nonlocal before, changes, since
        updates = replica.updates(replica.gradients(rows))
        mine.compute(seconds)
        if exchange.period == 1 and since == 0:
            combined = exchange.step(updates)
            mine.count_work()
            replica.add(combined)
            return
        if since == 0:
            before, changes = [np.array(w) for w in replica.weights], [np.zeros_like(u) for u in updates]
        since += 1
        replica.add(updates)
        changes = [c + u for c, u in zip(changes, updates, strict=True)]
        if since >= exchange.period:
            combined = exchange.take(StepInput(changes, steps=since))
            replica.assign([b + c for b, c in zip(before, combined, strict=True)])
            since = 0
        mine.count_work()

    return step


def _with_weights(strategy: Strategy, tensors: int) -> _Step:
    """Return the step of a strategy that averages weights when a period ends."""
    taken = since = 0
    period = 1

    def step(replica: Replica, rows: int, exchange: Any, mine: RankClock, seconds: np.ndarray) -> None:
        nonlocal taken, since, period
        replica.add(replica.updates(replica.gradients(rows)))
        mine.compute(seconds)
        if since == 0:
            period = next(length for first, length in reversed(strategy.schedule) if first <= taken)
        taken, since = taken + 1, since + 1
        if since >= period:
            since, share = 0, np.float32(1.0)
            own = [t * share for t in [*replica.weights, *replica.slots][:tensors]]
            replica.assign(exchange.mean(own, {np.dtype(np.float32): share}))
        mine.count_work()

    return step


def _outcome(plan: _Plan, logs: Sequence[_Log]) -> Outcome:
    first, count = window(plan.last, plan.predicted.period if plan.predicted is not None else 1)
    ends = np.max([log.ends for log in logs], axis=0)

    def mean_of(totals: Sequence[np.ndarray]) -> list[float]:
        return (np.mean([rows[first + count] - rows[first] for rows in totals], axis=0) / count).tolist()

    sent, received, crossing, message = mean_of([log.bytes for log in logs])
    return Outcome(
        seconds=float(ends[first + count] - ends[first]) / count,
        parts=dict(zip(PARTS, mean_of([log.parts for log in logs]), strict=True)),
        sent=sent,
        received=received,
        crossing=crossing,
        message=message,
        memory=_OWN * plan.situation.elements + logs[0].memory + plan.buffers,
        losses=logs[0].losses,
        total=float(ends[plan.last]),
        taken=plan.last,
        running=len(logs),
        steps=count,
        rows=logs[0].rows,
    )


def window(steps: int, period: int) -> tuple[int, int]:
    """Return the first of the steps that means are of, and their number: whole periods after the first steps.

    Example:
        >>> window(50, 1), window(50, 16), window(4, 1), window(3, 16)
        ((16, 34), (18, 32), (1, 3), (0, 3))
    """
    warm = int(_LEFT_OUT * steps)
    count = (steps - warm) // period * period
    return (steps - count, count) if count else (0, steps)
