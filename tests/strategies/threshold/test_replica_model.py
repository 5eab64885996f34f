"""Promises of the protocol that hold in every order of delivery: two and three ranks, a few messages each."""

import pytest

from hvdx.strategies.threshold.replica import Replica
from tests.strategies.threshold.replica_model import BrokenError, Model

RULES = {
    "inf": {},
    "inf, one in flight": {"most": 1},
    "inf, one byte in flight": {"room": 1},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("messages", [(3, 3), (1, 3), (4, 2), (0, 2)], ids=str)
def test_every_order_of_two_ranks_keeps_the_promises(messages, rule):
    assert Model(messages, **RULES[rule]).explore() > 10


@pytest.mark.parametrize("messages", [(1, 1, 1), (2, 1, 1), (1, 0, 2), (0, 2, 1)], ids=str)
def test_every_order_of_three_ranks_keeps_the_promises(messages):
    assert Model(messages).explore() > 20


@pytest.mark.parametrize("messages", [(1, 0, 2), (0, 2, 0)], ids=str)
def test_every_order_of_three_ranks_keeps_a_limit_in_flight(messages):
    assert Model(messages, most=1).explore() > 20


def test_search_finds_a_rank_that_waits_forever(monkeypatch):
    monkeypatch.setattr(Replica, "tell", lambda self: [])
    with pytest.raises(BrokenError, match="wait forever"):
        Model((3, 1), most=1).explore()


def test_search_finds_ranks_with_orders_of_their_own(monkeypatch):
    """If ranks applied messages as they arrive, their weights would differ."""
    receive = Replica.receive

    def as_it_comes(self, sender, packet):
        receive(self, sender, packet)
        if self.rank and packet.kind.name == "ORDER":
            self._order.clear()
        elif self.rank and packet.kind.name == "UPDATE":
            self._order.append(sender)

    monkeypatch.setattr(Replica, "receive", as_it_comes)
    with pytest.raises(BrokenError):
        Model((1, 1, 1)).explore()
