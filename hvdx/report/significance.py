"""Differences that noise can explain: comparison of a few runs of each strategy.

Values are oriented so that lower is better; infinity stands for a run that failed or did not reach the target, which is
counted and not dropped. The better strategy of a pair is chosen by the same values, so the probability of the exact
one-sided Mann-Whitney test counts twice. Four runs each are enough for a difference by ranks alone: if every run of one
strategy is better than every run of the other, 2p is 0.029. Three runs give 2p = 0.1 at best; they are enough if the
difference of the means also exceeds 1.25 times the larger of the two ranges. Among two equal strategies with normal
noise a winner is called in 2.3 % of all cases with three runs each, in 2.9 % with four, and in 5 % at most; among more
strategies in fewer (tests/report/test_verdict.py simulates it).
"""

import math
from collections.abc import Mapping, Sequence

#: Fewest runs of a strategy from which a difference is called; MLPerf asks for 3 to 10.
RUNS = 3
#: Largest probability of a difference by chance.
LEVEL = 0.05
#: Ranges by which the means must differ. With 1 in place of 1.25, one of two equal strategies wins in 5 % of all cases.
MARGIN = 1.25
#: Ranges by which a strategy must be behind the best one to be left out of those that cannot be told apart. With 1.25,
#: one of five equal strategies is left out in 14 % of all cases; with 2, in 3 %.
CLEARLY = 2.0
# Ordered pairs from which the better and the worse of two strategies are chosen.
_OF_TWO = 2


def mean(values: Sequence[float]) -> float:
    """Return the mean; infinity if a value is infinite."""
    return sum(values) / len(values) if values else math.inf


def spread(values: Sequence[float]) -> float:
    """Return the range of the finite values; 0 if there are fewer than two."""
    finite = [value for value in values if math.isfinite(value)]
    return max(finite) - min(finite) if finite else 0.0


def probability(better: Sequence[float], worse: Sequence[float]) -> float:
    """Return the probability of a ranking at least as clear if both come from one distribution: exact Mann-Whitney.

    Args:
        better: values that are lower.
        worse: values that are higher. Ties between the two count against the difference.

    Example:
        >>> probability([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
        0.05
    """
    pairs = sum(b >= w for b in better for w in worse)
    counts = _rankings(len(better), len(worse))
    return sum(counts[: pairs + 1]) / sum(counts)


def _rankings(m: int, n: int) -> list[int]:
    """Return the number of rankings of m and n values for each number of pairs in the wrong order."""
    table = {(0, j): [1] for j in range(n + 1)} | {(i, 0): [1] for i in range(m + 1)}
    for i in range(1, m + 1):
        for j in range(1, n + 1):
            counts = [0] * (i * j + 1)
            # The highest value is one of the m, behind all of the n; or one of the n.
            for pairs, count in enumerate(table[i - 1, j]):
                counts[pairs + j] += count
            for pairs, count in enumerate(table[i, j - 1]):
                counts[pairs] += count
            table[i, j] = counts
    return table[m, n]


def separated(better: Sequence[float], worse: Sequence[float]) -> bool:
    """Return whether every value of one strategy is lower than every value of the other.

    Example:
        >>> separated([1.0, 1.1, 1.5], [1.6, 1.7, 1.8]), separated([1.0, 1.7], [1.6, 1.8])
        (True, False)
    """
    return bool(better) and bool(worse) and max(better) < min(worse)


def beats(better: Sequence[float], worse: Sequence[float], ranges: float = MARGIN, pairs: int = _OF_TWO) -> bool:
    """Return whether a difference exceeds what noise can explain.

    Args:
        better: values of the strategy that may be better; lower is better.
        worse: values of the other one.
        ranges: number of ranges that the difference of the means must exceed, if ranks alone do not decide.
        pairs: number of ordered pairs from which this one was chosen by its values.

    Example:
        >>> beats([1.0, 1.1, 1.2], [2.0, 2.1, 2.3]), beats([1.0, 1.1, 1.5], [1.6, 1.7, 1.8])
        (True, False)
        >>> beats([1.0, 1.1, 1.4, 1.5], [1.6, 1.7, 1.8, 1.9])  # four runs each: by ranks
        True
    """
    # With three runs each, the probability is a twentieth exactly; its floating-point value may be above.
    chance = probability(better, worse) if better and worse else 1.0
    if chance > LEVEL + 1e-9:
        return False
    behind, ahead = mean(worse), mean(better)
    if math.isinf(behind):
        return math.isfinite(ahead)
    return pairs * chance <= LEVEL or behind - ahead > ranges * max(spread(better), spread(worse))


def ranking(values: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the names, best first: by the number of infinite values, then by the mean of the others."""

    def key(name: str) -> tuple[int, float, str]:
        finite = [value for value in values[name] if math.isfinite(value)]
        return len(values[name]) - len(finite), mean(finite), name

    return sorted(values, key=key)


def unbeaten(values: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the names that cannot be told apart from the best one, best first.

    One name is a winner: it beats each of the others.

    Args:
        values: values of each strategy, one for each run; lower is better.

    Example:
        >>> unbeaten({"a": [1.0, 1.1, 1.2], "b": [2.0, 2.1, 2.3]})
        ['a']
    """
    best, *others = ranking(values)
    if all(beats(values[best], values[name]) for name in others):
        return [best]
    pairs = len(values) * (len(values) - 1)
    open_to = [name for name in others if not beats(values[best], values[name], CLEARLY, pairs)]
    return [best, *(open_to or others[:1])]
