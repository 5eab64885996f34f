"""Sum of a vector over MPI in blocks, with one flow a link in each direction.

Every rank sums one piece of the vector. In turn it sends a block of a piece to each other rank, then a block of its own
sum to each, and so on. All ranks follow one schedule: the k-th block of a round goes to the rank k places further and
comes from the rank k places before, so no link has to carry the blocks of several ranks at once. A ring has this
property too, but it would add each element in another order, and round partial sums to the dtype on the network.
"""

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from hvdx.comm.base import BLOCK_BYTES, Cast, add_in_order

if TYPE_CHECKING:
    from mpi4py import MPI

# Number of blocks by which a rank may have sent more than it has received, so that a rank that is ahead does not fill
# the queues of the others' links. With 8, eight hosts took 1.06 times as long at 100 Mbit/s.
_AHEAD = 16
# Tag of the messages. MPI keeps the order of those from one rank to another, so all can have the same.
_TAG = 8


class BlockSum:
    """Sum of one vector, in progress.

    Args:
        comm: communicator of the ranks, at least two; it carries no other messages with this tag.
        vector, scale, cast: see `Channel.sum_in_order`.
    """

    def __init__(self, comm: "MPI.Comm", vector: np.ndarray, scale: float, cast: Cast):
        self._comm, self._scale, self._cast, self._dtype = comm, scale, cast, vector.dtype
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._others = others = self._size - 1
        ends = (np.arange(1, self._size) * vector.size // self._size * vector.itemsize).tolist()
        # The pieces: addends, which become sums.
        self._pieces = np.split(vector.view(np.uint8), ends)
        count = -(-max(piece.size for piece in self._pieces) // BLOCK_BYTES)
        # So many rounds pass from the addends of a block to its sum that no rank waits for the sum.
        lag = -(-_AHEAD // (2 * others))
        # Each round has one block for each other rank: addends (True) or sums, and the number of the block.
        addends, sums = ([(kind, block) for block in range(count)] for kind in (True, False))
        self._rounds = addends[:lag]
        for pair in zip(addends[lag:], sums, strict=False):
            self._rounds += pair
        self._rounds += sums[max(count - lag, 0) :]
        # Number of the round in which the addends of a block are sent.
        self._given = {block: number for number, (addends, block) in enumerate(self._rounds) if addends}
        # Addends of blocks whose sum is not ready: those that may arrive before others of their block, or before their
        # turn to be summed.
        self._arriving = np.empty((2 + (_AHEAD + others) // others, self._size, BLOCK_BYTES), np.uint8)
        self._total, self._sent, self._posted, self._received, self._summed = others * len(self._rounds), 0, 0, 0, 0
        self._sending: deque[MPI.Request] = deque()
        self._receiving: deque[MPI.Request] = deque()

    @property
    def done(self) -> bool:
        """True after the last block was sent and received."""
        return self._received == self._total == self._sent and not self._sending

    def advance(self) -> bool:
        """Receive, sum and send what is possible without waiting; return whether there was progress."""
        before = self._received, self._sent, len(self._sending)
        while self._receiving and self._receiving[0].Test():
            self._receiving.popleft()
            self._received += 1
            self._sum_if_complete()
        while self._sending and self._sending[0].Test():
            self._sending.popleft()
        # A block finds its place in memory if its receive is posted before it arrives.
        while self._posted < min(self._received + _AHEAD + self._others, self._total) and self._is_free(self._posted):
            self._receiving.append(self._comm.Irecv(*self._incoming(self._posted), _TAG))
            self._posted += 1
        while self._sent < min(self._received + _AHEAD, self._total) and self._is_ready(self._sent):
            self._sending.append(self._comm.Isend(*self._outgoing(self._sent), _TAG))
            self._sent += 1
        return before != (self._received, self._sent, len(self._sending))

    def _find(self, message: int) -> tuple[bool, slice, int, int]:
        """Return whether a message of the schedule holds addends, its bytes in a piece, its block, and its k."""
        number, k = divmod(message, self._others)
        addends, block = self._rounds[number]
        return addends, slice(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES), block, k + 1

    def _outgoing(self, message: int) -> tuple[np.ndarray, int]:
        """Return the content of a message, uint8[bytes], and the rank to which it goes."""
        addends, part, _, k = self._find(message)
        to = (self._rank + k) % self._size
        return self._pieces[to if addends else self._rank][part], to

    def _incoming(self, message: int) -> tuple[np.ndarray, int]:
        """Return the buffer of a message, uint8[bytes], and the rank from which it comes."""
        addends, part, block, k = self._find(message)
        sender = (self._rank - k) % self._size
        return (self._slot(block)[sender] if addends else self._pieces[sender][part]), sender

    def _slot(self, block: int) -> np.ndarray:
        """Return the buffer for the addends of all ranks to one block of this rank's piece, uint8[size, bytes]."""
        mine = min(self._pieces[self._rank].size - block * BLOCK_BYTES, BLOCK_BYTES)
        return self._arriving[block % len(self._arriving), :, : max(mine, 0)]

    def _is_ready(self, message: int) -> bool:
        addends, _, block, _ = self._find(message)
        return addends or block < self._summed

    def _is_free(self, message: int) -> bool:
        """Return whether a message may be received: a sum takes the place of an addend, which must have been sent."""
        addends, _, block, k = self._find(message)
        # What comes from the rank k places before goes to the one `size - k` places further.
        return addends or self._sent - len(self._sending) > self._given[block] * self._others + self._others - k

    def _sum_if_complete(self) -> None:
        """Sum a block of this rank's piece if the last message that arrived completes its addends."""
        addends, part, block, k = self._find(self._received - 1)
        if not addends or k < self._others:
            return
        slot = self._slot(block)
        mine = self._pieces[self._rank][part]
        slot[self._rank] = mine
        add_in_order(list(slot.view(self._dtype)), mine.view(self._dtype), self._scale, self._cast)
        self._summed += 1
