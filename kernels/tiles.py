"""Constants of the format and borders of tiles, shared by the three implementations of the threshold kernels.

`docs/wire-format.md` describes the bytes. An encoder is free to choose where a tile ends and which Rice parameter a
block has; all three implementations make the same choices, so a GPU and a CPU write the same bytes.
"""

from typing import NamedTuple

import numpy as np

from hvdx.kernels.arrays import Float32Array, Int64Array, UInt8Array

#: Number of gaps that share one Rice parameter.
BLOCK = 64
#: Quotients below this are unary; larger ones escape to an Elias-gamma code, so that one huge gap costs few bits.
ESCAPE = 8
#: Largest Rice parameter: it takes 5 bits in a message.
K_MAX = 31
#: Extra bits of a change of the Rice parameter, compared with keeping it.
SWITCH = 5
#: Largest number of entries in a tile. Decoders may have buffers of this size.
TILE_MAX = 4096
#: Largest m of an entry.
M_MAX = 2**31 - 1
#: Largest number of elements of an update; with it every index and every sum of gaps fits 63 bits.
N_MAX = 2**48

#: Number of neighbours of which a sample has all or none: a cache line of float32.
LINE = 16


class Malformed(ValueError):  # noqa: N818
    """Bytes that are not tiles, or not tiles for the expected number of elements.

    Attributes:
        message: position of the message among those that were decoded together, from 0.
    """

    def __init__(self, text: str, message: int = 0) -> None:
        super().__init__(text)
        self.message = message


class Layout(NamedTuple):
    """Borders of the encoder's tiles. Tests use smaller values than the defaults, to reach every border.

    The elements are divided into regions. The entries of a region fill tiles of `tile_max`. The remaining entries make
    a tile if there are at least `tile_min`; fewer ones share a tile with the remaining entries of the next regions. A
    shared tile ends when it holds `group` entries, when it covers `group_regions` regions, or before a region that has
    tiles of its own.

    Attributes:
        region: number of elements of a region, a multiple of 64, at most 2**30.
        tile_max: largest number of entries of a tile, at most TILE_MAX.
        tile_min: smallest number of entries of a tile that is not shared.
        group: number of entries that ends a shared tile; group + tile_min <= TILE_MAX.
        group_regions: number of regions that ends a shared tile; region * group_regions <= 2**31.
    """

    region: int = 1 << 18
    tile_max: int = 4096
    tile_min: int = 512
    group: int = 2048
    group_regions: int = 4096


LAYOUT = Layout()


class Runs(NamedTuple):
    """Runs of consecutive elements that share a tau.

    Attributes:
        lengths: int64[R], number of elements of each run, at least 1.
        taus: float32[R], positive and normal.
    """

    lengths: Int64Array
    taus: Float32Array


def limit(taus: Float32Array) -> Float32Array:
    """Return the largest absolute value in an update, float32[R]. With a residual below tau, m then fits M_MAX."""
    return np.minimum(np.asarray(taus, np.float64) * 2.0**30, 2.0**126).astype(np.float32)


class Encoded(NamedTuple):
    """Result of an encoder.

    Attributes:
        tiles: uint8[bytes], the tiles one after another.
        sent: int64[R], number of entries in each run.
        fault: index of the first element of the update that cannot be sent (NaN, infinity, above `limit`), or -1. If it
            is not -1, the residual is unchanged and there are no tiles.
    """

    tiles: UInt8Array
    sent: Int64Array
    fault: int

    @classmethod
    def of_fault(cls, fault: int, runs: int) -> "Encoded":
        """Return the result of an encoder that found a fault."""
        return cls(np.zeros(0, np.uint8), np.zeros(runs, np.int64), fault)


def check_layout(layout: Layout) -> None:
    """Raise ValueError unless the tiles of this layout fit the buffers of the kernels."""
    possible = (
        min(layout) >= 1
        and layout.region % 64 == 0
        and layout.tile_max <= TILE_MAX
        and layout.group + layout.tile_min <= TILE_MAX
        and layout.region <= 2**30
        and layout.region * layout.group_regions <= 2**31
    )
    if not possible:
        raise ValueError(f"layout: expected numbers within the limits that Layout names, got {layout}.")


def plan(counts: Int64Array, layout: Layout = LAYOUT) -> Int64Array:
    """Return the number of entries of each tile in order, int64[tiles].

    Args:
        counts: int64[regions], number of entries in each region.
        layout: borders of tiles.

    Example:
        >>> plan(np.array([3, 2, 9, 0, 1]), Layout(region=64, tile_max=8, tile_min=4, group=5, group_regions=8))
        array([5, 8, 2])
    """
    tiles: list[int] = []
    waiting = regions = 0
    for count in counts.tolist():
        rest = count
        if rest >= layout.tile_min and waiting:
            tiles.append(waiting)
            waiting = regions = 0
        while rest >= layout.tile_min:
            tiles.append(min(rest, layout.tile_max))
            rest -= tiles[-1]
        waiting += rest
        regions = regions + 1 if waiting else 0
        if waiting >= layout.group or regions >= layout.group_regions:
            if waiting:
                tiles.append(waiting)
            waiting = regions = 0
    if waiting:
        tiles.append(waiting)
    return np.array(tiles, np.int64)


def factors(lookahead: float) -> tuple[np.float32, np.float32]:
    """Return the factor of an update, 1 + lookahead, and the share of the product that is subtracted again.

    Example:
        >>> factors(3.0)
        (np.float32(4.0), np.float32(0.75))
    """
    return np.float32(1 + lookahead), np.float32(lookahead / (1 + lookahead))
