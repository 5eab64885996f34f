"""Verdicts: criteria, noise, failures, one worker, flips."""

# Tests: hvdx/report/significance.py

from pathlib import Path

import numpy as np
import pytest

from hvdx.report import significance
from hvdx.report.overview import Setting, Trouble
from hvdx.report.records import Epoch, RankRecord, Run
from hvdx.report.verdict import BEST, FASTEST, IN_EPOCHS, IN_TIME, TO_TARGET, judge


def run(name, seed=0, workers=2, link=None, second=1.0, values=(0.5, 0.6, 0.7), metric="val_accuracy", **outcome):
    """Return a run with an epoch every `second` seconds and these values of the metric."""
    epochs = [
        Epoch(i, 10 * i, second * i + 1, {metric: v, "loss": None if v is None else 1 - v})
        for i, v in enumerate(values, 1)
    ]
    record = RankRecord({"size": workers, "strategy": name}, {}, epochs, {"time": second * len(values) + 1})
    told = {"asked": name, "workers": workers, "bandwidth": link, "seed": seed, "exit_code": 0, **outcome}
    return Run(Path(f"{name}-{workers}-{link}-{seed}"), dict.fromkeys(range(workers), record), told)


def runs(name, offset=0.0, second=1.0, seeds=3, **options):
    """Return runs of some seeds, whose times and values differ a little."""
    return [
        run(name, s, second=second * (1 + s / 100), values=[v + offset + s / 1000 for v in (0.5, 0.6, 0.7)], **options)
        for s in range(seeds)
    ]


def by_kind(verdict):
    return {criterion.kind: criterion for criterion in verdict.criteria}


# --- noise


def test_two_runs_are_too_few_and_ranks_that_overlap_decide_nothing():
    assert not significance.beats([1.0, 1.01], [2.0, 2.01])
    assert not significance.beats([1.0, 1.01, 2.1], [2.0, 9.0, 9.1], ranges=0.5)
    assert significance.beats([1.0, 1.01, 1.02], [2.0, 2.01, 2.02])


def called(shift, strategies, trials=2000, seeds=3):
    """Return the share of trials with a winner, and with a strategy left out of those that cannot be told apart."""
    draws = np.random.default_rng(7).normal(size=(trials, strategies, seeds))
    draws[:, 0] -= shift
    found = [significance.unbeaten({str(i): row for i, row in enumerate(trial)}) for trial in draws.tolist()]
    alone = [names for names in found if len(names) == 1]
    return len(alone) / trials, sum(names == ["0"] for names in found) / trials, found


@pytest.mark.parametrize("strategies", [2, 5])
def test_equal_strategies_have_a_winner_in_at_most_a_twentieth_of_all_cases(strategies):
    share, _, found = called(0.0, strategies)
    assert share <= 0.05
    assert sum(len(names) < strategies for names in found) / len(found) <= 0.05


@pytest.mark.parametrize("strategies", [2, 5])
def test_difference_of_five_sigma_is_found(strategies):
    assert called(5.0, strategies, trials=500)[1] > 0.8


def test_probability_is_that_of_the_exact_test():
    assert significance.probability([1, 2, 3], [4, 5, 6]) == pytest.approx(1 / 20)
    assert significance.probability([1, 2, 4], [3, 5, 6]) == pytest.approx(2 / 20)
    assert significance.probability([4, 5, 6], [1, 2, 3]) == 1
    assert significance.probability([1, 2], [2, 3]) == pytest.approx(2 / 6)


def test_four_seeds_decide_by_ranks_alone():
    share, _, found = called(0.0, 2, seeds=4)
    assert share <= 0.05
    _, _, found = called(0.0, 5, seeds=6)
    assert sum(len(names) < 5 for names in found) / len(found) <= 0.05
    assert significance.beats([1, 2, 8, 9], [10, 11, 12, 13])
    assert not significance.beats([1, 8, 9], [10, 11, 12])


def test_failures_are_worse_than_any_value_and_are_not_a_difference_of_their_own():
    inf = float("inf")
    assert significance.ranking({"a": [1, 1, inf], "b": [9, 9, 9]}) == ["b", "a"]
    assert significance.beats([1, 2, 3], [inf, inf, inf])
    assert not significance.beats([9, 9, 9], [1, 1, inf])
    assert not significance.beats([inf, inf, inf], [inf, inf, inf])


# --- criteria


def test_each_criterion_has_its_winner():
    found = runs("fast", second=1.0) + runs("good", offset=0.1, second=2.0)
    verdict = judge(found, ("val_accuracy", 0.65))
    criteria = by_kind(verdict)
    winners = {kind: criterion.winner for kind, criterion in criteria.items()}
    assert winners == {FASTEST: "fast", BEST: "good", IN_TIME: "fast", IN_EPOCHS: "good", TO_TARGET: "fast"}
    assert criteria[FASTEST].margin == "1.01 s, 2.00 times as fast as good (2.02 s)"
    assert criteria[IN_EPOCHS].title == "Highest val_accuracy in 3 epochs"
    assert criteria[TO_TARGET].title == "Time to val_accuracy 0.65"
    assert [row.strategy for row in criteria[BEST].rows] == ["good", "fast"]
    assert criteria[BEST].rows[0].spread == "0.8000 to 0.8020"
    assert all(criterion.sentence in verdict.text() for criterion in verdict.criteria if criterion.called)


def test_two_seeds_are_not_enough():
    verdict = judge(runs("a", seeds=2) + runs("b", offset=0.1, second=2))
    assert verdict.sentences == ["No winner by any criterion: not enough runs: 3 seeds are needed, a has 2."]
    for criterion in verdict.criteria:
        assert not criterion.called
        assert criterion.why == "not enough runs: 3 seeds are needed, a has 2"


def test_strategies_within_the_noise_are_named():
    criterion = by_kind(judge(runs("a", second=1.0) + runs("b", second=1.001) + runs("c", second=3.0)))[FASTEST]
    assert not criterion.called
    assert criterion.why.startswith("noise can explain the differences between a (")
    assert "b (" in criterion.why
    assert "c (" not in criterion.why


def finals(name, values, **options):
    """Return a run for each value, which is that of its last epoch."""
    return [run(name, seed, values=(0.3, 0.4, value), **options) for seed, value in enumerate(values)]


def test_spread_of_a_bad_strategy_is_not_called_noise():
    """Ranges that do not overlap: 0.905 to 0.917, and 0.45 to 0.73."""
    dense = finals("all_reduce", (0.905, 0.911, 0.917))
    found = by_kind(judge(dense + finals("threshold", (0.45, 0.629, 0.73))))[BEST]
    assert not found.called
    assert found.why == (
        "3 seeds are too few, though every run of all_reduce (0.9110) is better than every run of threshold (0.6030). "
        "Do: --seeds 4"
    )
    third = finals("averaging", (0.904, 0.912, 0.914))
    found = by_kind(judge(dense + third + finals("threshold", (0.45, 0.629, 0.73))))[BEST]
    assert found.why.startswith(
        "noise can explain the differences between all_reduce (0.9110), averaging (0.9100); 3 seeds are too few"
    )
    four = finals("all_reduce", (0.905, 0.911, 0.917, 0.91)) + finals("threshold", (0.45, 0.629, 0.73, 0.6))
    assert by_kind(judge(four))[BEST].winner == "all_reduce"


@pytest.mark.parametrize(
    ("alone", "said"),
    [((0.946, 0.948, 0.95), "Do not distribute, 2 workers: one worker learns better ("),
     ((0.30, 0.31, 0.32), "Distribute or not, 2 workers: 3 seeds are too few (")],
)  # fmt: skip
def test_spread_of_a_bad_strategy_does_not_make_it_as_good_as_one_worker(alone, said):
    verdict = judge(finals("threshold", (0.45, 0.629, 0.73)) + finals("one worker", alone, workers=1))
    assert verdict.sentences[0].startswith(said), verdict.sentences[0]


def test_lower_is_better_for_losses():
    low, high = (
        [run(n, s, values=[v + s / 100], metric="val_loss") for s in range(3)] for n, v in (("x", 1), ("y", 2))
    )
    verdict = judge(low + high, ("val_loss", 1.5))
    assert by_kind(verdict)[BEST].winner == "x"
    assert by_kind(verdict)[BEST].title.startswith("Lowest val_loss")
    assert by_kind(verdict)[TO_TARGET].winner == "x"
    assert "y, 2 workers: 3 of 3 runs did not reach val_loss 1.5." in verdict.sentences


def test_failed_and_diverged_runs_count_as_the_worst_and_are_told():
    bad = [run("bad", s, second=0.1, exit_code=1, reason="boom") for s in range(3)]
    nan = [run("nan", s, second=2.0, values=(0.9, 0.9 + s / 100, None)) for s in range(3)]
    gone = [Trouble("gone", Setting(2), str(s), "no record", Path("x")) for s in range(3)]
    verdict = judge(runs("good") + bad + nan, troubles=gone)
    criteria = by_kind(verdict)
    assert criteria[BEST].winner == criteria[FASTEST].winner == "good"
    for text in ("bad, 2 workers: 3 of 3 runs failed", "gone, 2 workers: 3 of 3 runs failed", "nan, 2 workers: 3 of 3"):
        assert any(sentence.startswith(text) for sentence in verdict.sentences), text


def test_nobody_reaches_the_target():
    verdict = judge(runs("a") + runs("b", second=2.0), ("val_accuracy", 0.99))
    assert by_kind(verdict)[TO_TARGET].why == "no run with several workers reached it"
    assert "a, 2 workers: 3 of 3 runs did not reach val_accuracy 0.99." in verdict.sentences


# --- sentences


@pytest.mark.parametrize(
    ("second", "begin"),
    [(3.0, "Distribute, 2 workers: time"),
     (1.001, "Do not distribute, 2 workers: one worker reaches the target as soon, within"),
     (0.2, "Do not distribute, 2 workers: one worker reaches the target sooner")],
)  # fmt: skip
def test_one_worker_is_compared_with_the_best_strategy(second, begin):
    alone = runs("one worker", second=second, workers=1)
    verdict = judge(runs("a", second=1.0) + runs("b", second=4.0) + alone, ("val_accuracy", 0.65))
    assert verdict.sentences[0].startswith(begin)


def test_winner_that_changes_with_the_bandwidth_is_told():
    found = [r for link, (a, b) in {"10mbit": (5, 1), "1gbit": (1, 2)}.items()
             for r in runs("dense", second=a, link=link) + runs("sparse", second=b, link=link)]  # fmt: skip
    verdict = judge(found)
    assert any(
        s.startswith("The bandwidth decides (2 workers). Fastest training, seconds an epoch: "
                     "sparse at 10 Mbit/s; dense at 1 Gbit/s.")
        for s in verdict.sentences
    )  # fmt: skip


def test_seeds_without_effect_are_told_and_decide_nothing_but_times():
    same = [run(n, s, second=t + s / 100, values=v) for n, t, v in (("a", 1, (0.5,) * 3), ("b", 2, (0.6,) * 3))
            for s in range(3)]  # fmt: skip
    verdict = judge(same)
    assert verdict.sentences[0].startswith("The seeds had no effect")
    assert by_kind(verdict)[FASTEST].called
    assert not by_kind(verdict)[BEST].called


def test_no_runs_and_only_one_worker_have_a_sentence():
    assert judge([]).sentences == ["There are no runs to judge."]
    assert "All runs have one worker" in judge(runs("one worker", workers=1)).sentences[0]
