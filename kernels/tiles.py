"""What the three implementations of the threshold kernels share: the format's constants and where tiles end.

`docs/wire-format.md` says what the bytes mean. What is here and not there is the encoder's free choice (where it ends a
tile, which Rice parameter it takes); all three choose alike, so that a GPU and a CPU write the same bytes.
"""

from typing import NamedTuple

import numpy as np

#: Entries that share one Rice parameter.
BLOCK = 64
#: Quotients below this are unary; larger ones escape to an Elias-gamma code, so that one huge gap costs little.
ESCAPE = 8
#: Largest Rice parameter: it travels in 5 bits.
K_MAX = 31
#: What a change of the Rice parameter costs over keeping it, in bits.
SWITCH = 5
#: Largest number of entries in a tile; a decoder may count on it.
TILE_MAX = 4096
#: Largest m: an entry stands for at most this many times tau.
M_MAX = 2**31 - 1
#: Largest number of elements of an update; with it every index and every sum of gaps fits 63 bits.
N_MAX = 2**48

#: The residual is counted against these shares of tau, for whoever wants to choose the next tau.
SHARES = (0.875, 0.75, 0.5, 0.25)


class Malformed(ValueError):  # noqa: N818
    """Bytes that are not tiles, or not tiles for this many elements.

    Attributes:
        message: which of several messages it is, where several were decoded.
    """

    def __init__(self, text: str, message: int = 0) -> None:
        super().__init__(text)
        self.message = message


class Layout(NamedTuple):
    """Where the encoder ends its tiles. The defaults are for work; tests take smaller ones to meet every border.

    The elements are cut into regions. A region's entries fill tiles of `tile_max`; what then is left makes a tile if
    it has `tile_min` entries, and otherwise waits to share a tile with the leftovers of the next regions. A shared
    tile ends as soon as it holds `group` entries, covers `group_regions` regions, or meets a region with tiles.

    Attributes:
        region: elements, a multiple of 64, at most 2**30.
        tile_max: entries, at most TILE_MAX.
        tile_min: entries.
        group: entries; group + tile_min <= TILE_MAX.
        group_regions: regions; region * group_regions <= 2**31.
    """

    region: int = 1 << 18
    tile_max: int = 4096
    tile_min: int = 512
    group: int = 2048
    group_regions: int = 4096


LAYOUT = Layout()


class Runs(NamedTuple):
    """Which elements use which tau: each run of consecutive elements has one.

    Attributes:
        lengths: int64[R], elements, at least 1 each.
        taus: float32[R], positive and normal.
    """

    lengths: np.ndarray
    taus: np.ndarray


def limit(taus: np.ndarray) -> np.ndarray:
    """The largest size an element of an update may have: float32[R]. With a residual below tau, m then fits M_MAX."""
    return np.minimum(np.asarray(taus, np.float64) * 2.0**30, 2.0**126).astype(np.float32)


class Encoded(NamedTuple):
    """What an encoder gives back.

    Attributes:
        tiles: uint8[bytes], the tiles one after another.
        sent: int64[R], entries in each run.
        near: int64[R, len(SHARES)], elements of each run's new residual at or above each share of its tau.
        fault: index of the first element of the update that cannot be sent (NaN, infinity, too many tau), or -1.
            Where it is not -1 the residual is as it was, and there are no tiles.
    """

    tiles: np.ndarray
    sent: np.ndarray
    near: np.ndarray
    fault: int

    @classmethod
    def of_fault(cls, fault: int, runs: int) -> "Encoded":
        """What an encoder gives back that found a fault."""
        return cls(np.zeros(0, np.uint8), np.zeros(runs, np.int64), np.zeros((runs, len(SHARES)), np.int64), fault)


def check_layout(layout: Layout) -> None:
    """Raise ValueError unless a tile of this layout fits into what the kernels have for it."""
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


def plan(counts: np.ndarray, layout: Layout = LAYOUT) -> np.ndarray:
    """The tiles that regions with these numbers of entries make.

    Args:
        counts: int64[regions], entries in each region.
        layout: where tiles end.

    Returns:
        int64[tiles], entries in each tile, in order.

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
