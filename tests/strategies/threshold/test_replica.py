"""The state machine of one rank, one packet at a time."""

import pytest

from hvdx.errors import ExchangeError
from hvdx.strategies.threshold.replica import Kind, Packet, Replica


def update(number, seen=0, payload="update"):
    return Packet(-1, Kind.UPDATE, number, seen, payload)


def test_a_message_waits_for_its_place_and_a_place_for_its_message():
    replica = Replica(2, 3)
    replica.receive(0, Packet(-1, Kind.ORDER, 0, payload=(1, 0)))
    assert replica.take() is None
    replica.receive(0, update(0, payload="of 0"))
    assert replica.take() is None
    replica.receive(1, update(0, payload="of 1"))
    assert [replica.take(), replica.take(), replica.take()] == [(1, "of 1"), (0, "of 0"), None]


@pytest.mark.parametrize("packet", [update(1), Packet(-1, Kind.ORDER, 3, payload=(1,))])
def test_lost_packets_are_an_error(packet):
    with pytest.raises(ExchangeError, match=r"rank 1 expected message 0 of rank 0, got [13].*again"):
        Replica(1, 2).receive(0, packet)


def test_repeated_packets_are_an_error():
    replica = Replica(1, 2)
    replica.receive(0, update(0))
    with pytest.raises(ExchangeError, match="expected message 1 of rank 0, got 0"):
        replica.receive(0, update(0))


def test_places_given_between_two_announcements_travel_together():
    replica = Replica(0, 3)
    replica.receive(2, update(0))
    replica.send("mine")
    replica.receive(1, update(0))
    assert [(one.to, one.number, one.payload) for one in replica.announce()] == [(1, 0, (2, 0, 1)), (2, 0, (2, 0, 1))]
    assert replica.announce() == []


def test_a_sender_waits_for_the_rank_that_is_far_behind():
    replica = Replica(0, 3, most=2)
    for _ in range(2):
        assert replica.awaited_to_send() == []
        replica.send("message")
    replica.receive(1, update(0, seen=2))
    assert replica.awaited_to_send() == [2]
    replica.receive(2, Packet(-1, Kind.SEEN, 1))
    assert replica.awaited_to_send() == []


def test_bytes_in_flight_are_limited_but_one_large_message_may_leave():
    replica = Replica(0, 2, room=10)
    assert replica.awaited_to_send(100) == []
    replica.send("large", 100)
    assert replica.awaited_to_send(1) == [1]
    replica.receive(1, Packet(-1, Kind.SEEN, 1))
    replica.send("small", 6)
    assert replica.awaited_to_send(4) == []
    assert replica.awaited_to_send(5) == [1]


def test_a_rank_tells_what_it_applied_once():
    replica = Replica(1, 3)
    replica.receive(0, update(0))
    replica.receive(0, Packet(-1, Kind.ORDER, 0, payload=(0,)))
    replica.take()
    assert [(one.to, one.number) for one in replica.tell()] == [(0, 1)]
    assert replica.tell() == []


def test_waits_name_the_rank_that_must_act():
    replica = Replica(1, 3)
    replica.flush()
    assert replica.awaited_to_end() == [0, 2]
    replica.receive(2, Packet(-1, Kind.FLUSH, 2))
    assert replica.awaited_to_end() == [0]
    replica.receive(0, Packet(-1, Kind.FLUSH, 1))
    assert replica.awaited_to_end() == [0, 2]
    replica.receive(2, update(0))
    replica.receive(0, update(0))
    assert replica.awaited_to_end() == [0]  # which must place them
    replica.receive(0, Packet(-1, Kind.ORDER, 0, payload=(2, 2, 0)))
    replica.take()
    assert replica.awaited_to_end() == [2]  # whose second message comes before that of rank 0


def test_one_rank_alone_waits_for_nobody():
    replica = Replica(0, 1, most=1)
    for _ in range(3):
        assert replica.awaited_to_send() == []
        replica.send("message")
        assert replica.take() == (0, "message")
    replica.flush()
    assert replica.awaited_to_end() == []
