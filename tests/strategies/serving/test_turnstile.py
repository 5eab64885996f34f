"""Tickets for the steps of an epoch."""

import random

from hvdx.strategies.serving.turnstile import Turnstile


def test_each_ticket_is_given_out_once():
    turnstile = Turnstile()
    assert [turnstile.ask(1, 3) for _ in range(5)] == [(True, 1), (True, 2), (True, 3), (False, 3), (False, 3)]


def test_a_round_without_tickets_gives_none():
    assert Turnstile().ask(1, 0) == (False, 0)


def test_a_new_round_begins_when_it_is_asked_for():
    turnstile = Turnstile()
    turnstile.ask(1, 1)
    assert turnstile.ask(2, 1) == (True, 1)
    assert turnstile.ask(2, 1) == (False, 1)


def test_what_was_left_of_an_older_round_is_not_given_out():
    turnstile = Turnstile()
    turnstile.ask(1, 5)
    turnstile.ask(2, 5)
    granted, _ = turnstile.ask(1, 5)
    assert not granted
    assert turnstile.ask(2, 5) == (True, 2)


def test_rounds_may_be_left_out():
    turnstile = Turnstile()
    turnstile.ask(1, 1)
    assert turnstile.ask(7, 2) == (True, 1)


def test_workers_of_any_speed_take_the_whole_round_together():
    for seed in range(20):
        turnstile, chance = Turnstile(), random.Random(seed)
        for round_ in (1, 2, 3):
            tickets, taken, asking = chance.randrange(30), [0] * 4, [0, 1, 2, 3]
            while asking:
                worker = chance.choice(asking)
                granted, given = turnstile.ask(round_, tickets)
                taken[worker] += granted
                assert given == sum(taken)
                if not granted:
                    asking.remove(worker)
            assert sum(taken) == tickets
