"""Search through all orders in which the packets of some replicas may arrive and their workers may act."""

from collections import deque
from typing import NamedTuple

from hvdx.strategies.threshold.replica import Replica

# What a worker does next: begin, send a message, end, nothing.
BEGIN, SEND, END, DONE = range(4)


class BrokenError(AssertionError):
    """A promise of the protocol is broken."""


class State(NamedTuple):
    """State of all ranks.

    Attributes:
        replicas: state machine of each rank; never changed, but replaced.
        keys: contents of each replica, hashable.
        phases: next action of each worker.
        channels: packets in flight, by sender and receiver.
        order: senders of all placed messages, in order.
        applied: number of messages that each rank has applied.
    """

    replicas: tuple
    keys: tuple
    phases: tuple
    channels: tuple
    order: tuple
    applied: tuple

    @property
    def key(self):
        return self.keys, self.phases, self.channels, self.applied


class Model:
    """Workers that each send some messages and then flush.

    Args:
        messages: number of messages of each rank.
        most, room: see `Replica`; each message has one byte.
        begins: whether the session has to begin; if not, it has begun on all ranks.
    """

    def __init__(self, messages, most=64, room=1 << 62, begins=True):
        self.messages, self.most, self.room, self.begins = messages, most, room, begins
        self.size = len(messages)
        # Without a limit of the messages in flight, nobody reads how many of them were applied.
        self.tells = most < 64 or room < 64

    def explore(self):
        """Visit all states, and return their number."""
        first = tuple(Replica(r, self.size, self.most, self.room) for r in range(self.size))
        for replica in () if self.begins else first:
            replica.begun = True
        channels = ((),) * self.size**2
        state = State(first, tuple(map(key_of, first)), (BEGIN,) * self.size, channels, (), (0,) * self.size)
        seen, todo = {state.key}, [state]
        while todo:
            state = todo.pop()
            following = list(self.following(state))
            if not following:
                self.check_end(state)
            for after in following:
                if after.key not in seen:
                    seen.add(after.key)
                    todo.append(after)
        return len(seen)

    def following(self, state):
        """Yield the next states; of orders that differ for nobody, only one.

        A rank that does not place messages takes in a packet only if it waits: to act with more packets than it needs
        makes no difference for others, and to act with fewer is the worst case. If it can act, it acts at once: its
        packets may still arrive late. If it waits for the end, it needs all packets, in whichever order they come.
        """
        coming = [divmod(channel, self.size) for channel, packets in enumerate(state.channels) if packets]
        waits = [bool(self.awaited(r, phase)) for r, phase in zip(state.replicas, state.phases, strict=True)]
        for rank in range(1, self.size):
            if state.phases[rank] != DONE and not waits[rank]:
                yield self.act(state, rank)
                return
        if not self.tells:
            for sender, rank in coming:
                if rank and state.phases[rank] == END:
                    yield self.deliver(state, sender, rank)
                    return
        for sender, rank in coming:
            if rank == 0 or waits[rank]:
                yield self.deliver(state, sender, rank)
        if state.phases[0] != DONE and not waits[0]:
            yield self.act(state, 0)

    def awaited(self, replica, phase):
        if phase == BEGIN:
            return [] if replica.begun else [0]
        if phase == SEND:
            return replica.awaited_to_send(1)
        return replica.awaited_to_end()

    def deliver(self, state, sender, receiver):
        channels, at = list(state.channels), sender * self.size + receiver
        packet, channels[at] = channels[at][0], channels[at][1:]
        replica = clone(state.replicas[receiver])
        replica.receive(sender, packet)
        return self.settle(state, receiver, replica, channels, state.phases, replica.announce())

    def act(self, state, rank):
        replica, phase = clone(state.replicas[rank]), state.phases[rank]
        packets, after = [], DONE
        if phase == SEND:
            packets = replica.send((rank, replica.sent), 1) + replica.announce()
        elif phase == BEGIN and rank == 0:
            packets = replica.begin(None)
        if phase != END:
            after = SEND if replica.sent < self.messages[rank] else END
            packets += replica.flush() if after == END else []
        phases = (*state.phases[:rank], after, *state.phases[rank + 1 :])
        return self.settle(state, rank, replica, list(state.channels), phases, packets)

    def settle(self, state, rank, replica, channels, phases, packets):
        """Apply the messages that have arrived, tell the others if the worker waits, and return the next state."""
        order = state.order
        for packet in packets:
            if rank == 0 and packet.to == 1 and packet.kind.name == "ORDER":
                order += packet.payload
        applied = list(state.applied)
        while (taken := replica.take()) is not None:
            sender, message = taken
            number = order[: applied[rank]].count(sender)
            if order[applied[rank]] != sender or message != (sender, number):
                raise BrokenError(
                    f"rank {rank} applied {message} of rank {sender} as number {applied[rank]} of {order}"
                )
            applied[rank] += 1
        if self.tells and phases[rank] != DONE and self.awaited(replica, phases[rank]):
            packets = [*packets, *replica.tell()]
        for packet in packets:
            if phases[packet.to] != DONE:
                channels[rank * self.size + packet.to] += (packet if self.tells else packet._replace(seen=0),)
        if phases[rank] == DONE:
            for sender in range(self.size):
                channels[sender * self.size + rank] = ()  # the session is closed
        for sender in range(self.size):
            if len(replica._arrived[sender]) > self.most:
                raise BrokenError(f"rank {rank} stores {len(replica._arrived[sender])} messages of rank {sender}")
        replicas = (*state.replicas[:rank], replica, *state.replicas[rank + 1 :])
        keys = (*state.keys[:rank], key_of(replica), *state.keys[rank + 1 :])
        return State(replicas, keys, phases, tuple(channels), order, tuple(applied))

    def check_end(self, state):
        if state.phases != (DONE,) * self.size:
            raise BrokenError(f"ranks wait forever: phases {state.phases}, order {state.order}")
        wanted = sorted(r for r, number in enumerate(self.messages) for _ in range(number))
        if sorted(state.order) != wanted or set(state.applied) != {len(wanted)}:
            raise BrokenError(f"at the end ranks had applied {state.applied} of {state.order}")


def clone(replica):
    """Return a copy that shares nothing that changes."""
    new = object.__new__(Replica)
    for name, value in vars(replica).items():
        if type(value) is list:
            vars(new)[name] = [v.copy() if type(v) is deque else v for v in value]
        else:
            vars(new)[name] = value.copy() if type(value) is deque else value
    return new


def key_of(replica):
    """Return the contents of a replica, hashable."""
    return tuple(
        tuple(tuple(v) if isinstance(v, deque) else v for v in value) if isinstance(value, list | deque) else value
        for value in vars(replica).values()
    )
