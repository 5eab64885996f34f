"""Distribution of the steps of an epoch."""

import random

from hvdx.strategies.serving.server import StepDispenser


def test_each_step_is_handed_out_once():
    dispenser = StepDispenser()
    assert [dispenser.ask(1, 3) for _ in range(5)] == [
        (True, 1, False),
        (True, 2, False),
        (True, 3, False),
        (False, 3, False),
        (False, 3, False),
    ]


def test_a_dispenser_goes_on_where_another_one_stopped():
    dispenser = StepDispenser()
    assert [dispenser.ask(1, 5, known=known)[:2] for known in (3, 0, 4)] == [(True, 4), (True, 5), (False, 5)]
    # What was handed out in an older round does not count.
    assert dispenser.ask(2, 5) == (True, 1, False)
    assert dispenser.ask(1, 5, known=4)[0] is False
    assert dispenser.ask(2, 5) == (True, 2, False)


def test_a_round_without_steps_grants_none():
    assert StepDispenser().ask(1, 0) == (False, 0, False)


def test_a_new_round_begins_with_its_first_request():
    dispenser = StepDispenser()
    dispenser.ask(1, 1)
    assert dispenser.ask(2, 1) == (True, 1, False)
    assert dispenser.ask(2, 1) == (False, 1, False)


def test_steps_left_of_an_older_round_are_not_handed_out():
    dispenser = StepDispenser()
    dispenser.ask(1, 5)
    dispenser.ask(2, 5)
    granted, *_ = dispenser.ask(1, 5)
    assert not granted
    assert dispenser.ask(2, 5) == (True, 2, False)


def test_rounds_may_be_skipped():
    dispenser = StepDispenser()
    dispenser.ask(1, 1)
    assert dispenser.ask(7, 2) == (True, 1, False)


def test_workers_of_any_speed_take_the_whole_round_together():
    for seed in range(20):
        dispenser, chance = StepDispenser(), random.Random(seed)
        for round_ in (1, 2, 3):
            steps, taken, asking = chance.randrange(30), [0] * 4, [0, 1, 2, 3]
            while asking:
                worker = chance.choice(asking)
                granted, handed_out, _ = dispenser.ask(round_, steps)
                taken[worker] += granted
                assert handed_out == sum(taken)
                if not granted:
                    asking.remove(worker)
            assert sum(taken) == steps


def test_a_stopped_round_is_over_for_all_and_the_next_is_not():
    dispenser = StepDispenser()
    dispenser.ask(1, 5)
    assert dispenser.ask(1, 5, stop=True) == (False, 1, True)
    assert dispenser.ask(1, 5) == (False, 1, True)
    assert dispenser.ask(2, 5) == (True, 1, False)


def test_a_round_without_steps_left_is_not_stopped():
    dispenser = StepDispenser()
    dispenser.ask(1, 1)
    assert dispenser.ask(1, 1, stop=True) == (False, 1, False)


def test_a_late_worker_does_not_stop_the_current_round():
    dispenser = StepDispenser()
    dispenser.ask(2, 5)
    assert dispenser.ask(1, 5, stop=True) == (False, 1, False)
    assert dispenser.ask(2, 5) == (True, 2, False)
