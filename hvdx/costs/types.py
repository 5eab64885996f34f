"""Values of the cost model: link, machine, layers, and a prediction."""

import math
from dataclasses import dataclass, field

#: Terms of a step, in their order.
TERMS = ("computing", "polling", "waiting", "copying", "encoding", "latency", "transfer", "decoding")


@dataclass(frozen=True)
class Link:
    """Network from one rank to all others, as the slowest rank measures it.

    Attributes:
        latency: seconds of an exchange of empty messages.
        bandwidth: bytes per second that one rank receives from all others together.
        reducing: share of the bandwidth that MPI's blocking all-reduce reaches; 1 if it was not measured.
    """

    latency: float
    bandwidth: float
    reducing: float = 1.0

    def __str__(self) -> str:
        return f"{8e-6 * self.bandwidth:,.0f} Mbit/s, {1e3 * self.latency:.2g} ms"


@dataclass(frozen=True)
class Codec:
    """Speed of the threshold codec. The defaults are a lower bound of the time: one pass over the memory each.

    Attributes:
        encode_element, encode_entry: seconds to encode, for each element and for each element that is sent.
        decode_element, decode_entry: seconds to decode: to write each element of the sum, and to add an entry.
        decode_message: seconds to check and open a message, whatever its length.
        cut, join: seconds to cut a part off a message, and to join it to others, whatever its length.
    """

    encode_element: float = 4e-10
    encode_entry: float = 0.0
    decode_element: float = 0.0
    decode_entry: float = 0.0
    decode_message: float = 0.0
    cut: float = 0.0
    join: float = 0.0

    def encoding(self, elements: int, density: float) -> float:
        """Return the seconds to encode an update."""
        return elements * (self.encode_element + density * self.encode_entry)

    def decoding(self, elements: int, density: float, messages: int) -> float:
        """Return the seconds to set the output to the sum of messages."""
        of_entries = elements * (self.decode_element + messages * density * self.decode_entry)
        return of_entries + messages * self.decode_message


@dataclass(frozen=True)
class Machine:
    """Speeds of a machine. The defaults are those of a fast one, so that they predict a lower bound.

    Attributes:
        memory: bytes per second that a pass over arrays reads and writes.
        message: seconds of work for a small message of TCP, sent and received.
        transport: bytes per second that TCP carries within this machine, an upper limit of each link.
        codec: speed of the threshold codec.
    """

    memory: float = 2e10
    message: float = 0.0
    transport: float = math.inf
    codec: Codec = field(default_factory=Codec)


@dataclass(frozen=True)
class Layer:
    """Dense layer that could be split, or embedding.

    Attributes:
        name: name of the layer.
        inputs, outputs: elements of its input and its output, for each sample.
        parameters: number of its weights.
    """

    name: str
    inputs: int
    outputs: int
    parameters: int


@dataclass(frozen=True)
class Prediction:
    """Predicted costs of a step.

    Attributes:
        terms: seconds of each of `TERMS`; absent ones are 0.
        sent: bytes that a worker sends in a step.
        memory: bytes on a worker, by purpose.
        samples: samples per second of all workers together; 0 if the batch is unknown.
        period: number of steps over which costs of one exchange were divided.
        note: choice that the strategy made, such as its density; "" for none.
        starved: True if the link carries so little that the workers hardly learn from each other. Such a step is fast,
            and no reason to distribute.

    Example:
        >>> Prediction({"computing": 0.02, "transfer": 0.01}, 1e6, {"weights": 4.0}, 100.0).bottleneck
        'computing'
    """

    terms: dict[str, float]
    sent: float
    memory: dict[str, float]
    samples: float = 0.0
    period: int = 1
    note: str = ""
    starved: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.terms.values())

    @property
    def overhead(self) -> float:
        """Seconds of a step without computing."""
        return self.seconds - self.terms.get("computing", 0.0)

    @property
    def bottleneck(self) -> str:
        """The largest term."""
        return max(self.terms, key=lambda name: self.terms[name])
