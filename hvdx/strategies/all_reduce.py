"""Dense synchronous averaging: in every step, every rank receives the mean of all gradients."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, cast, get_args

from hvdx.comm import Comm, GraphComm
from hvdx.comm.array_comm import ArrayComm
from hvdx.comm.buckets import GivenSums
from hvdx.comm.interfaces import Engine, Reduction, Tensor, Wire
from hvdx.costs.model import Situation, added
from hvdx.costs.sizes import ring_bytes
from hvdx.costs.types import Prediction
from hvdx.errors import ConfigError
from hvdx.strategies.contract import Exchange, Strategy, TensorSpec, one_of

Op = Literal["average", "sum"]
Sparse = Literal["gather", "dense"]


class AllReduce(Strategy):
    """Mean (or sum) of the gradients over all ranks, in every step.

    With `op="average"`, N ranks with batches of size b take the step that one process takes with a batch of size N*b.

    Args:
        op: "average" or "sum".
        compression: type of float32 values on the network: "none", "fp16" or "bf16". "fp16" halves the bytes, and its
            largest number is 65504. "bf16" halves them too, has float32's range and 8 bits of precision, and is added
            up in float32.
        groups: number of collectives per step. 1 fuses all gradients into one collective; with more, Horovod sends the
            first gradients while the rest are still being computed. Or lists of indices, one list for each collective;
            gradients are numbered in the order of the trainable variables that have one.
        sparse: exchange of `tf.IndexedSlices` (gradients of embeddings): "gather" the rows, or "dense" for the whole
            table.
        gradient_predivide_factor: with "average", divide by this factor before the sum and by size / factor after it.
        device: TensorFlow device of Horovod's collectives; "" leaves it to TensorFlow.
        device_sparse: device of the collectives of gathered rows.
        engine: "horovod": a ring all-reduce in the TensorFlow graph. "mpi": each rank adds up a part of the gradients
            on the host, in float32 and in rank order, and sends the result to the others; the number of bytes is the
            same. "auto": Horovod if it sends the tensors of GPUs by NCCL on all ranks, else MPI.

    Raises:
        ConfigError: if an option is unknown or has a wrong value.

    Example:
        >>> AllReduce(compression="fp16")
        AllReduce(compression='fp16')

    Source: Sergeev and Del Balso 2018, "Horovod: fast and easy distributed deep learning in TensorFlow".
    """

    name = "all_reduce"
    placement = "gradient"
    runs = "graph"
    survives = True

    def __init__(
        self,
        op: Op = "average",
        compression: Wire = "none",
        groups: int | Sequence[Sequence[int]] = 1,
        sparse: Sparse = "gather",
        gradient_predivide_factor: float = 1.0,
        device: str = "",
        device_sparse: str = "",
        engine: Engine = "auto",
    ):
        one_of("AllReduce", "op", op, get_args(Op))
        one_of("AllReduce", "compression", compression, get_args(Wire))
        one_of("AllReduce", "sparse", sparse, get_args(Sparse))
        one_of("AllReduce", "engine", engine, get_args(Engine))
        if isinstance(groups, int) and groups < 1:
            raise ConfigError(f"AllReduce: groups: expected 1 or more, got {groups}.")
        if gradient_predivide_factor <= 0 or (gradient_predivide_factor != 1 and op != "average"):
            raise ConfigError(
                f"AllReduce: gradient_predivide_factor: expected a positive number, and 1 unless op is 'average'; "
                f"got {gradient_predivide_factor} with op={op!r}."
            )
        self.op = op
        self.weighs = op == "average"
        self.compression = compression
        self.groups = groups if isinstance(groups, int) else tuple(tuple(group) for group in groups)
        self.sparse = sparse
        self.gradient_predivide_factor = float(gradient_predivide_factor)
        self.device = device
        self.device_sparse = device_sparse
        self.engine = engine
        self._how = Reduction(
            average=op == "average",
            wire=compression,
            groups=self.groups,
            sparse=sparse,
            predivide=self.gradient_predivide_factor,
            device=device,
            device_sparse=device_sparse,
            of_step=True,
        )

    def problem_with_split(self) -> str:
        if isinstance(self.groups, int):
            return ""
        return (
            "groups: expected a number for a model with split layers, whose gradients are exchanged in two sets, got "
            "lists of gradients. Give groups=1."
        )

    def predict(self, situation: Situation) -> Prediction:
        situation = situation.with_engine(self.engine)
        itemsize = 2 if self.compression != "none" and situation.narrows else 4
        if self.sparse == "dense":
            situation = replace(situation, tables=())
        whole = situation.elements - sum(table.parameters for table in situation.tables)
        rows, gathered = situation.gathering(itemsize)
        dense = situation.reduction(itemsize, whole)
        terms = added([dense, {"transfer": -situation.hidden(itemsize, dense.get("transfer", 0.0))}, rows])
        terms |= {"waiting": situation.slowest, "polling": situation.polling()}
        buffers = {"buffers": situation.reduction_memory(itemsize, whole)}
        return situation.prediction(terms, ring_bytes(itemsize * whole, situation.workers) + gathered, buffers)

    def open(self, comm: Comm, specs: Sequence[TensorSpec], name: str = "") -> "AllReduceExchange":
        graph = cast(GraphComm, comm)  # strategies in the graph are given one
        how = replace(self._how, sizes=tuple(s.elements for s in specs)) if self.groups == 1 else self._how
        return AllReduceExchange(graph, how, name, specs)


class AllReduceExchange(Exchange[Tensor]):
    """Exchange of gradients under `AllReduce`. It has no state.

    Args:
        comm: the ranks.
        how: reduction.
        name: prefix of the names of the collectives.
        specs: the gradients.
    """

    def __init__(self, comm: GraphComm, how: Reduction, name: str, specs: Sequence[TensorSpec]):
        self._comm, self._how, self._name = comm, how, name
        narrow = None if how.wire == "none" else 2
        self._bytes = [s.elements * (narrow or s.itemsize) for s in specs]
        self.row_itemsize = 0 if how.sparse == "dense" else narrow
        self.sent = ring_bytes(sum(self._bytes), comm.size)

    def step(self, tensors: Sequence[Tensor], finite: bool = True) -> list[Tensor]:
        in_rows = [i for i, t in enumerate(tensors) if self.row_itemsize != 0 and hasattr(t, "indices")]
        self.sent = ring_bytes(sum(self._bytes) - sum(self._bytes[i] for i in in_rows), self._comm.size)
        return self._comm.all_reduce(tensors, self._how, self._name)

    def given_sums(self) -> GivenSums | None:
        return self._comm.given_sums(self._how, self._name) if isinstance(self._comm, ArrayComm) else None
