"""Cost model: seconds, bytes and memory of a training step under a strategy, predicted without training.

`Auto` and `hvdx advise` use the same model. A strategy predicts its step in `Strategy.predict`, with the methods of
`Situation`. Its input is measured on this machine (`hvdx.costs.measure`) and on the
link (`hvdx.costs.link`), or counted in the code of the exchange: rounds, bytes and passes over memory. No number
is fitted to measured steps.

A step is a sum of terms:

    computing   forward pass, backward pass and optimiser, as on one worker
    polling     computing that is slower because Horovod's thread takes a part of a core
    waiting     for the slowest worker, or for a parameter server that is busy
    copying     passes over the tensors on the host: buffers, casts, sums
    encoding    the codec's encoder
    latency     rounds of the exchange, the overhead of each message, and polling
    transfer    bytes on the link, less what the backward pass hides
    decoding    the codec's decoder
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from hvdx.comm.buckets import fill
from hvdx.comm.interfaces import Engine
from hvdx.comm.sums import BLOCK_BYTES, staging_bytes
from hvdx.comm.waiting import overshoot
from hvdx.costs.types import TERMS, Layer, Link, Machine, Prediction

# Horovod's thread looks for tensors this often, in seconds; with `rarely`, see `hvdx.comm.horovod`.
_CYCLE, _RARE_CYCLE = 1e-3, 5e-3
# Share of a step's computing after which the first gradients are ready: that of the forward pass.
_FORWARD = 1 / 3
# Bytes of Horovod's fusion buffer.
_FUSION = 128 << 20


@dataclass(frozen=True)
class Situation:
    """Training whose costs are predicted.

    Attributes:
        workers: number of workers.
        tensors: number of float32 elements of each trained variable.
        computing: seconds of a step without an exchange.
        link: network of each host, in each direction.
        machine: speeds of each host.
        engine: library that carries tensors in the graph: "horovod" or "mpi".
        batch: samples in a step of one worker; 0 if unknown.
        slots: values that the optimiser keeps for each weight.
        spread: standard deviation of `computing`, in seconds.
        layers: dense layers, in the order of the model.
        tables: embeddings.
        per_host: number of workers that share a host and its link.
        cores: cores of each worker; below 1 if workers share cores.

    Example:
        >>> situation = Situation(2, (1_000_000,), 0.02, Link(0.0, 1e6))
        >>> round(situation.ring(4e6)["transfer"], 3)
        4.0
    """

    workers: int
    tensors: tuple[int, ...]
    computing: float
    link: Link
    machine: Machine = field(default_factory=Machine)
    engine: Engine = "mpi"
    batch: int = 0
    slots: float = 0.0
    spread: float = 0.0
    layers: tuple[Layer, ...] = ()
    tables: tuple[Layer, ...] = ()
    per_host: int = 1
    cores: float = 1.0

    def with_engine(self, wanted: Engine) -> "Situation":
        """Return the same situation with the engine of a strategy; "auto" keeps the engine.

        Args:
            wanted: "horovod", "mpi" or "auto".
        """
        return self if wanted == "auto" else replace(self, engine=wanted)

    @property
    def narrows(self) -> bool:
        """True if the engine sends float16 and bfloat16 where a strategy asks for it; within a host, MPI does not."""
        return self.engine != "mpi" or self.workers > self.per_host

    @property
    def elements(self) -> int:
        """Number of trained elements."""
        return sum(self.tensors)

    @property
    def network(self) -> Link:
        """Link as the exchange finds it: no faster than TCP on this machine; within one host, only that."""
        if self.workers <= self.per_host:
            return Link(self.machine.message, min(self.machine.transport, self.machine.memory))
        return replace(self.link, bandwidth=min(self.link.bandwidth, self.machine.transport))

    @property
    def slowest(self) -> float:
        """Seconds for which a worker waits for the slowest one: expected maximum of normal distributions (Blom)."""
        if self.workers == 1:
            return 0.0
        return self.spread * NormalDist().inv_cdf((self.workers - 0.375) / (self.workers + 0.25))

    def passes(self, bytes_per_element: float, elements: float | None = None) -> float:
        """Return the seconds of passes over arrays.

        Args:
            bytes_per_element: bytes that the passes read and write for each element.
            elements: number of elements; by default those of all tensors.
        """
        return bytes_per_element * (self.elements if elements is None else elements) / self.machine.memory

    def ring(self, payload: float) -> dict[str, float]:
        """Return the terms of an all-reduce of MPI: a ring, or recursive doubling if that is faster.

        The ring has 2 (N - 1) rounds with 1 / N of the bytes each; doubling has log2 N rounds with all of them.

        Args:
            payload: bytes of the tensors.
        """
        count, network = self.workers, self.network
        hop, bandwidth = network.latency + self.machine.message, network.bandwidth * network.reducing
        ring = 2 * (count - 1) * hop, 2 * (count - 1) / count * payload / bandwidth
        rounds = math.ceil(math.log2(count))
        doubling = rounds * hop, rounds * payload / bandwidth
        latency, transfer = min(ring, doubling, key=sum)
        return {"latency": latency, "transfer": transfer}

    def all_to_all(self, part: float, rounds: int = 1) -> dict[str, float]:
        """Return the terms of an exchange on the host, in which each rank sends every other rank some bytes at once.

        It is that of `Channel.exchange`.

        Args:
            part: bytes from one rank to another.
            rounds: number of such exchanges, one after another.
        """
        others, network = self.workers - 1, self.network
        if not others:
            return {"latency": 0.0, "transfer": 0.0}
        crossing = float(others)
        if self.workers > self.per_host:
            # Messages of all ranks of a host share its link; those within the host do not use it.
            crossing = self.per_host * (self.workers - self.per_host)
        # The link's latency is that of an exchange with at least one other rank.
        latency, transfer = network.latency + (others - 1) * self.machine.message, crossing * part / network.bandwidth
        return {"latency": rounds * (latency + overshoot(latency + transfer)), "transfer": rounds * transfer}

    def between_hosts(self) -> "Situation":
        """Return the situation of a worker of each host, with its piece of the elements and its share of the link."""
        piece = -(-self.elements // self.per_host)
        shared = replace(self.link, bandwidth=self.link.bandwidth / self.per_host)
        return replace(self, workers=self.workers // self.per_host, per_host=1, link=shared, tensors=(piece,))

    def within_host(self) -> dict[str, float]:
        """Return the terms of adding up tensors over the workers of a host, and of gathering the sums.

        Each worker adds up one piece of the tensors. It copies the other pieces to memory that the workers share.
        """
        count = self.per_host
        # The copy; the sum of the pieces of all workers. Results are decoded into shared memory.
        copying = self.passes(8 * (count - 1) / count + 4 + 4 / count)
        # Headers before the sum and after encoding, and the end of decoding.
        return {"latency": 3 * (self.machine.message + overshoot(self.machine.message)), "copying": copying}

    def reduction(self, itemsize: int, elements: float, rarely: bool = False) -> dict[str, float]:
        """Return the terms of an all-reduce of tensors in the graph, with the copies that its engine makes.

        Args:
            itemsize: bytes per element on the network: 4, or 2 for float16.
            elements: number of elements.
            rarely: whether most steps have no all-reduce.
        """
        if self.workers == 1:
            return {}
        payload, casts = itemsize * elements, 0.0
        if itemsize < 4:
            # To float16 and back. A cast moves half the bytes per second of a copy (TensorFlow on x86-64).
            casts = 2 * self.passes(2 * (4 + itemsize), elements)
        if self.engine == "mpi":
            return added([self._dense(payload), {"copying": casts}])
        # Horovod: into and out of the fusion buffer, and one sum. Before that, its thread wakes up and the ranks agree
        # that the tensors are ready, by an all-reduce of a few bytes.
        terms, cycle = self.ring(payload), _RARE_CYCLE if rarely else _CYCLE
        agreement = math.ceil(math.log2(self.workers)) * (self.network.latency + self.machine.message)
        terms["latency"] += cycle / 2 + agreement
        return {"copying": self.passes(4 * itemsize + 3 * itemsize, elements) + casts} | terms

    def _dense(self, payload: float) -> dict[str, float]:
        """Return the terms of a sum over MPI on the host; see `hvdx.comm.sums`.

        Args:
            payload: bytes of the tensors.
        """
        count, link = self.workers, self.network
        here = min(count, self.per_host)
        hosts = count // here
        terms = {"latency": 0.0, "transfer": 0.0, "copying": 2 * payload / self.machine.memory}
        if here > 1:
            # Into shared memory; the piece of each vector, and of the sum; out of it. Two exchanges of headers.
            terms["copying"] = (2 + (here + 1) / here + 2) * payload / self.machine.memory
            terms["latency"] = 2 * (self.machine.message + overshoot(self.machine.message))
        if hosts > 1:
            # The ranks of a host share its link, and each carries its piece. Additions overlap with the transfer, which
            # begins with addends only and ends with sums only. The last block is awaited with back-off.
            messages = 2 * (hosts - 1) * math.ceil(payload / count / BLOCK_BYTES)
            terms["transfer"] = 2 * (hosts - 1) / hosts * payload / link.bandwidth
            block = min(payload / count, BLOCK_BYTES) * here / link.bandwidth
            terms["latency"] += 2 * link.latency + overshoot(block) + messages * self.machine.message
        return terms

    def hidden(self, itemsize: int, transfer: float) -> float:
        """Return the seconds of a transfer of gradients over MPI that the backward pass hides; see `comm.buckets`.

        The gradients of each tensor are assumed to take a part of the backward pass like its part of the elements.

        Args:
            itemsize: bytes per element on the network.
            transfer: seconds of the transfer of all gradients.
        """
        if self.engine != "mpi" or self.workers <= self.per_host or not self.elements:
            return 0.0
        ready, end = _FORWARD * self.computing, 0.0
        for bucket in fill([itemsize * elements for elements in self.tensors]):
            part = sum(self.tensors[index] for index in bucket) / self.elements
            ready += part * (1 - _FORWARD) * self.computing
            end = max(ready, end) + part * transfer
        return self.computing + transfer - end

    def gathering(self, itemsize: int) -> tuple[dict[str, float], float]:
        """Return the terms of gathering the gradients of embeddings, and the bytes that a worker sends for it.

        Such a gradient has a row for each id in the batch, with its index.

        Args:
            itemsize: bytes per element of a row on the network.
        """
        others, sizes = self.workers - 1, [self.batch * (itemsize * t.outputs + 4.0 * t.inputs) for t in self.tables]
        if not others:
            return {}, 0.0
        if self.engine == "mpi":
            # Headers travel before the rows, and the indices by themselves.
            return added([self.all_to_all(size / 2, rounds=2) for size in sizes]), others * sum(sizes)
        hop, bandwidth = self.network.latency + self.machine.message, self.network.bandwidth * self.network.reducing
        terms = {"latency": 2 * len(sizes) * others * hop, "transfer": others * sum(sizes) / bandwidth}
        return terms, others * sum(sizes)

    def polling(self, rarely: bool = False) -> float:
        """Return the seconds by which Horovod's thread makes a step's computing longer.

        In each cycle it sleeps, and then agrees with the other ranks; MPI occupies a core while it waits for them.

        Args:
            rarely: whether most steps have no all-reduce.
        """
        if self.workers == 1 or self.engine != "horovod":
            return 0.0
        agreement = math.ceil(math.log2(self.workers)) * (self.network.latency + self.machine.message)
        share = agreement / (agreement + (_RARE_CYCLE if rarely else _CYCLE))
        return self.computing * share / self.cores

    def reduction_memory(self, itemsize: int, elements: float) -> float:
        """Return the bytes of the buffers of `reduction`."""
        if self.workers == 1:
            return 0.0
        if self.engine != "mpi":
            return min(itemsize * elements, _FUSION)
        # The sums replace the tensors, in blocks; narrow ones are copies of the tensors.
        here = min(self.workers, self.per_host)
        staging = staging_bytes(int(itemsize * elements), here, self.workers > here)
        return staging + (itemsize * elements if itemsize < 4 else 0.0)

    def prediction(
        self,
        terms: dict[str, float],
        sent: float,
        buffers: dict[str, float] | None = None,
        workers: int | None = None,
        period: int = 1,
        note: str = "",
    ) -> Prediction:
        """Return a prediction: terms without those of the step itself, and buffers without weights and gradients.

        Args:
            terms: seconds of the exchange by name; "computing" is added.
            sent: bytes that a worker sends in a step.
            buffers: bytes of the exchange by purpose.
            workers: number of workers that train; by default all.
            period, note: see `Prediction`.
        """
        values = {"computing": self.computing} | terms
        known = {name: values[name] for name in (*TERMS, *(n for n in values if n not in TERMS)) if values.get(name)}
        own = {"weights": 4.0, "gradients": 4.0, "optimiser": 4.0 * self.slots}
        memory = {name: size * self.elements for name, size in own.items()} | (buffers or {})
        rate = (self.workers if workers is None else workers) * self.batch / max(sum(known.values()), 1e-12)
        return Prediction(known, sent, memory, rate, period, note)


def one_worker(situation: Situation) -> Prediction:
    """Return the prediction of one worker without a strategy.

    Example:
        >>> one_worker(Situation(4, (10,), 0.1, Link(0.0, 1.0), batch=32)).samples
        320.0
    """
    return replace(situation, workers=1).prediction({}, 0.0)


def split_layers(situation: Situation) -> Prediction | None:
    """Return the prediction of a training that splits those dense layers over all workers for which that is faster.

    The other weights are combined by an all-reduce in float32. docs/split-layers.md derives the bytes.

    Args:
        situation: the training, with its layers.

    Returns:
        None if no layer would be faster split.
    """
    count, batch = situation.workers, situation.batch
    if count == 1 or not batch:
        return None
    chosen: list[str] = []
    terms: dict[str, float] = {}
    sent, split_parameters = 0.0, 0
    for position, layer in enumerate(situation.layers):
        # Gathered inputs, and outputs there and back; the gradient of the first layer's inputs does not travel.
        backward = position > 0
        parts = [4.0 * batch * layer.inputs] * (1 + backward) + [4.0 * batch * layer.outputs / count] * 2
        exchanges = [situation.all_to_all(part) for part in parts]
        copying = situation.passes(8, count * batch * (layer.inputs * (1 + backward) + 2 * layer.outputs / count))
        mine = {name: sum(e[name] for e in exchanges) for name in ("latency", "transfer")} | {"copying": copying}
        whole = situation.reduction(4, layer.parameters)
        shared = (whole["transfer"] + whole["copying"], sum(mine.values()))
        if shared[1] < shared[0]:
            chosen.append(layer.name)
            split_parameters += layer.parameters
            sent += (count - 1) * sum(parts)
            terms = {name: terms.get(name, 0.0) + value for name, value in mine.items()}
    if not chosen:
        return None
    rest = situation.elements - split_parameters
    terms = added([terms, situation.reduction(4, rest), {"polling": situation.polling()}])
    terms["waiting"] = situation.slowest
    made = situation.prediction(terms, sent + 8.0 * rest * (count - 1) / count, note=f"split {', '.join(chosen)}")
    kept = (rest + split_parameters / count) / max(situation.elements, 1)
    return replace(made, memory={name: size * kept for name, size in made.memory.items()})


def added(terms: Sequence[dict[str, float]], factor: float = 1.0) -> dict[str, float]:
    """Return the sums of terms by name, times a factor.

    Example:
        >>> added([{"latency": 1.0}, {"latency": 2.0, "transfer": 4.0}], 0.5)
        {'latency': 1.5, 'transfer': 2.0}
    """
    total: dict[str, float] = {}
    for each in terms:
        for name, value in each.items():
            total[name] = total.get(name, 0.0) + factor * value
    return total
