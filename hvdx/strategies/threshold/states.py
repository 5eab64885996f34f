"""Saved states of the threshold strategy: their residuals as one, for other numbers of ranks and of elements."""

from collections.abc import Mapping, Sequence

import numpy as np

from hvdx.errors import ConfigError
from hvdx.strategies.threshold.shards import Shards

#: Prefix of the state of a shard in a saved state of `ShardedRoute`, and its number of ranks.
OWNER, OWNERS = "owner.", "owner.ranks"


def whole_residual(state: Mapping[str, np.ndarray], rank: int) -> Mapping[str, np.ndarray]:
    """Return a saved state in which the residual of the shard has been added to the residual of the rank.

    Args:
        state: state of an exchange by any route.
        rank: rank of the state.

    Raises:
        ConfigError: if the residual is not that of a shard.
    """
    if OWNERS not in state:
        return state
    residual, ranks = state["codec.residual"], int(state[OWNERS])
    shards, shard = Shards([residual.size], max(ranks, 1)), state[OWNER + "residual"]
    if ranks <= rank or shard.size != shards.shard_size:
        raise ConfigError(
            f"threshold: the saved state: expected the residual of shard {rank} of {residual.size} elements, got "
            f"{shard.size} elements of one of {ranks} shards."
        )
    return dict(state) | {"codec.residual": residual + shards.embed(shard, rank)}


def merge(saved: Sequence[Mapping[str, np.ndarray]], rank: int, size: int) -> dict[str, np.ndarray]:
    """Distribute the saved residuals over the ranks, so that their sum stays the same; see `Strategy.merge`."""
    # The state of a piece of a host's elements fits its own hosts only.
    state = saved[rank % len(saved)]
    mine = {k: np.array(v) for k, v in state.items() if not k.startswith("piece")}
    residual = np.zeros_like(mine["codec.residual"], dtype=np.float64)
    for other in range(rank, len(saved), size):
        residual += saved[other]["codec.residual"]
    mine["codec.residual"] = residual.astype(np.float32)
    return mine | (_reshard(saved, rank, size) if OWNERS in mine else {})


def _reshard(saved: Sequence[Mapping[str, np.ndarray]], rank: int, size: int) -> dict[str, np.ndarray]:
    """Cut the residuals of the shards of saved states anew, for another number of ranks.

    Args:
        saved: state of each rank that saved, in rank order; all are of a sharded exchange.
        rank, size: rank, and number of ranks now.

    Returns:
        The entries of the new state that differ from those of `saved[rank % len(saved)]`.
    """
    sizes = [saved[0]["codec.residual"].size]
    before, now = Shards(sizes, len(saved)), Shards(sizes, size)
    whole = before.to_vector(np.concatenate([state[OWNER + "residual"] for state in saved]))
    return {
        OWNER + "residual": now.of_rank(whole, rank),
        OWNER + "lengths": np.array([now.shard_size], np.int64),
        OWNERS: np.array(size),
    }


def scaled(state: Mapping[str, np.ndarray], ratio: np.ndarray) -> dict[str, np.ndarray]:
    """Return the taus of a codec's state, and its count for `ratio` times the elements."""
    return {name: np.array(state[name]) for name in ("taus", "found")} | {
        "sent": np.rint(state["sent"] * ratio).astype(np.int64)
    }
