"""Costs of `Threshold`: prediction of a step, and choice between its two kinds of exchange."""

from dataclasses import replace

from hvdx.costs.model import Situation, added
from hvdx.costs.sizes import message_bytes
from hvdx.costs.types import Codec, Machine, Prediction
from hvdx.strategies.threshold.density import STARVED, affordable_density, budget_with, period_for
from hvdx.strategies.threshold.options import Options
from hvdx.strategies.threshold.shards import OWNER_DENSITY, owner_density

#: Bytes of the header of a message: status, two times and the size of the message. The sample of gradients that is
#: sent with Adam and its relatives, some 140 bytes, is not included: predictions do not know the optimiser.
HEADER_BYTES = 32
#: Bytes of the message of a part of an update, besides its entries: frame, lengths, tau and the header of a tile.
PART_BYTES = 26
# Density for which the kind of exchange is chosen if the density follows the network.
_NOMINAL_DENSITY = 0.01
# A sharded exchange delays an element twice, so it is chosen only below this share of the time of an all-gather.
_WORTH_SHARDING = 0.8
# Machine for which the kind of exchange is chosen: all ranks, and `predict`, must choose alike, so none is measured.
_NOMINAL = Machine(codec=Codec(3e-10, 4e-9, 1.5e-10, 7e-9, decode_message=1.5e-5, cut=5e-6, join=1e-5))
# Smallest number of ranks for which it is considered: with five or fewer, shards need more bytes.
_FEWEST_SHARDS = 6
# Ranks, and bytes of the messages of all, from which a fixed density is exchanged in shards: 8 ranks save a third of
# the bytes, 16 two thirds, and on most links so many bytes take longer than two rounds.
_MANY, _LARGE = 8, 1 << 18
# Density at which the cost of an exchange is its fixed part.
_NEXT_TO_NOTHING = 1e-9


def follows_link(options: Options, size: int) -> bool:
    """Return whether the kind of exchange depends on the link. If the density is fixed, it must not."""
    free = options.exchange == "auto" and options.target_density == "auto"
    return free and size >= _FEWEST_SHARDS


def kind_for(options: Options, situation: Situation) -> str:
    """Return the kind of exchange."""
    size, density = situation.workers, options.target_density
    if options.asynchronous:
        return "all_gather"
    if follows_link(options, size):
        kinds, nominal = ("all_gather", "sharded"), replace(situation, machine=_NOMINAL)
        gathered, sharded = (sum(exchange_costs(nominal, _NOMINAL_DENSITY, k)[0].values()) for k in kinds)
        return "sharded" if sharded < _WORTH_SHARDING * gathered else "all_gather"
    if options.exchange == "auto":
        # The result of a training with a fixed density must not depend on a measurement.
        many = size >= _MANY and isinstance(density, float)
        large = many and size * message_bytes(situation.elements, float(density or 0)) >= _LARGE
        return "sharded" if large else "all_gather"
    return options.exchange if size > 1 else "all_gather"


def exchange_costs(situation: Situation, density: float, kind: str) -> tuple[dict[str, float], float]:
    """Return the terms of an exchange, with the codec, and the bytes that a worker sends."""
    count, workers, codec = situation.elements, situation.workers, situation.machine.codec
    message = message_bytes(count, density)
    if kind == "all_gather":
        # Headers travel before the messages.
        terms = added([situation.all_to_all(HEADER_BYTES), situation.all_to_all(message)])
        coding = {
            "encoding": codec.encoding(count, density),
            "decoding": codec.decoding(count, density, workers),
        }
        return terms | coding, (workers - 1) * (message + HEADER_BYTES)
    of_owners = message_bytes(count, owner_density(density))
    parts = [message / workers + PART_BYTES, of_owners / workers + PART_BYTES]
    terms = added([situation.all_to_all(size) for size in (*parts, HEADER_BYTES / 2, HEADER_BYTES / 2)])
    shard = -(-count // workers)
    coding = {
        "encoding": codec.encoding(count, density)
        + codec.encoding(shard, owner_density(density))
        + workers * codec.cut,
        "decoding": codec.decoding(shard, density, workers)
        + codec.decoding(count, owner_density(density), 1)
        + workers * codec.join,
    }
    return terms | coding, (workers - 1) * (sum(parts) + HEADER_BYTES)


def predict(options: Options, situation: Situation) -> Prediction | None:
    """Predict the steps after the warm-up; None for a fixed tau, whose density depends on the updates."""
    if options.target_density is None:
        return None
    per_host = situation.per_host
    hosts, rest = divmod(situation.workers, per_host)
    dense = options.local != "none" and not options.asynchronous and per_host > 1 and hosts > 1 and not rest
    # Workers that exchange messages of a piece of the elements, and the work within a host.
    between = situation.between_hosts() if dense else situation
    within = situation.within_host() if dense else {}
    count, kind = between.elements, kind_for(options, between)

    def cost(density: float) -> float:
        return sum(within.values()) + sum(exchange_costs(between, density, kind)[0].values())

    density, budget, fixed = options.target_density, options.overhead * situation.computing, cost(_NEXT_TO_NOTHING)
    period = options.period if isinstance(options.period, int) else period_for(fixed, budget)
    if isinstance(density, str):
        density = affordable_density(cost, budget_with(fixed, budget * period))
    density = float(density)
    exchange, sent = exchange_costs(between, density, kind)
    coding = {name: exchange.pop(name) for name in ("encoding", "decoding")}
    hidden = min(situation.computing, sum(exchange.values())) if options.asynchronous else 0.0
    shown = 1 - hidden / max(sum(exchange.values()), 1e-12)
    own = {
        "waiting": 0.0 if options.asynchronous else situation.slowest,
        # The update is made, and the sum is added to the shared weights, as on one worker. The weights are these and
        # the share of the residual, which shards are copied for. A result of a host's workers is added to the weights.
        "copying": situation.passes(8 if options.asynchronous else 20 + 8 * (kind == "sharded" or dense)),
    }
    terms = added([own, within, coding, {name: value * shown for name, value in exchange.items()}])
    # The times of several steps differ less between workers than those of one step.
    terms = {name: value / (period**0.5 if name == "waiting" else period) for name, value in terms.items()}
    others = between.workers - 1
    message = message_bytes(count, density)
    # A sum that is not added where the shared weights are.
    result = 8.0 * count if dense or options.asynchronous else 0.0
    buffers = {"residual": 4.0 * count, "buffers": result + between.workers * message}
    note = f"density {density:.2g}"
    if kind == "sharded":
        # The residual and the sum of a shard, and a copy of the residual in the order of the tensors; each phase has
        # its messages twice, in parts and as a whole.
        moved = 2 * (1 + OWNER_DENSITY) * message
        buffers = {"residual": 4.0 * count * (1 + 1 / between.workers), "buffers": result + moved}
        buffers["buffers"] += 4.0 * count / between.workers + 4.0 * count * (not options.asynchronous)
        note += ", sharded"
    elif others and not options.asynchronous:
        note += ", all-gather"
    if dense:
        # The update in shared memory.
        buffers["buffers"] += 4.0 * situation.elements
        note += f", {per_host} workers of a host added up"
    if not options.asynchronous:
        buffers["shared weights"] = 4.0 * situation.elements
    if period > 1:
        note += f", every {period} steps"
    made = situation.prediction(terms, sent / period, buffers, period=period, note=note)
    if options.target_density == "auto" and others and density <= STARVED:
        # At so low a density an element waits for thousands of steps.
        return replace(made, starved=True, note=f"{made.note}, starved")
    return made
