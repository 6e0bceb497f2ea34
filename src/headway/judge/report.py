"""Statistics of verdicts and ratings, and of the judge's biases.

Confidence intervals are percentiles of the bootstrap (Efron 1979) over questions; the turns of a question are resampled
together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.judge.judgments import Judgment
from headway.report import cell, table

RESAMPLES, LEVEL = 10_000, 0.95
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A number and the bounds of its 95 % bootstrap interval; all None if there are no data."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return "-" if self.value is None else f"{cell(self.value)}  [{cell(self.low)}, {cell(self.high)}]"


@dataclass(frozen=True)
class Pairs:
    """Statistics of two sets of answers compared in both orders.

    wins, ties, losses: numbers of turns, from A's side. A win or loss needs the same verdict in both orders; all
        others are ties.
    win_rate: share of A's wins, with a tie as half a win.
    a_first, b_first: numbers of verdicts for A, ties and verdicts for B, by the side that was shown first.
    flips: number of turns whose verdict changed with the order.
    unparsed: number of verdicts that were not found in the reply; their turns are not counted.
    first_shown, longer: share of the verdicts other than ties that went to the answer shown first, or to the longer
        one (of two of unequal length).
    length_correlation: Pearson correlation of (length A - length B) / (length A + length B) with the turn's mean
        verdict (1 for A, -1 for B).
    """

    wins: int
    ties: int
    losses: int
    win_rate: Interval
    a_first: tuple[int, int, int]
    b_first: tuple[int, int, int]
    flips: int
    unparsed: int
    first_shown: float | None
    longer: float | None
    length_correlation: float | None

    def text(self) -> str:
        """Returns the statistics as a table."""
        turns = self.wins + self.ties + self.losses
        rows = [
            ("A wins, ties, B wins (both orders agree on a win)", f"{self.wins}, {self.ties}, {self.losses}"),
            ("win rate of A (a tie is half a win)", self.win_rate),
            ("A first: A, tie, B", ", ".join(map(str, self.a_first))),
            ("B first: A, tie, B", ", ".join(map(str, self.b_first))),
            ("verdicts that change with the order", f"{self.flips} of {turns}"),
            ("verdicts for the answer shown first", _share(self.first_shown)),
            ("verdicts for the longer answer", _share(self.longer)),
            ("correlation of verdict and length", self.length_correlation),
            ("verdicts not found in what was said", self.unparsed),
        ]
        return _table("pairs", rows)


@dataclass(frozen=True)
class Ratings:
    """Statistics of two sets of answers that were rated one by one.

    turns: number of turns for which both have a rating.
    mean_a, mean_b: mean ratings over these turns.   ratio: mean_a / mean_b.
    length_correlation: Pearson correlation of an answer's length with its rating.
    unparsed: number of ratings that were not found in the reply.
    """

    turns: int
    mean_a: float | None
    mean_b: float | None
    ratio: Interval
    length_correlation: float | None
    unparsed: int

    def text(self) -> str:
        """Returns the statistics as a table."""
        rows = [
            ("turns", self.turns),
            ("mean rating of A", self.mean_a),
            ("mean rating of B", self.mean_b),
            ("ratio of the means, A / B", self.ratio),
            ("correlation of rating and length", self.length_correlation),
            ("ratings not found in what was said", self.unparsed),
        ]
        return _table("ratings", rows)


def pairs_of(verdicts: Sequence[tuple[Judgment, Judgment]], *, seed: int = 0) -> Pairs:
    """Computes the statistics of verdicts on pairs, each judged in both orders."""
    complete = [both for both in verdicts if all(verdict.value is not None for verdict in both)]
    signs = np.array([[_sign(verdict) for verdict in both] for both in complete]).reshape(-1, 2)
    agreed = np.where(signs[:, 0] == signs[:, 1], signs[:, 0], 0.0)
    lengths = np.array([both[0].lengths for both in complete], dtype=np.float64).reshape(-1, 2)
    decided = [verdict for both in complete for verdict in both if verdict.value != "tie"]
    uneven = [verdict for verdict in decided if verdict.lengths[0] != verdict.lengths[1]]
    longer_by = (lengths[:, 0] - lengths[:, 1]) / np.maximum(lengths.sum(1), 1)
    return Pairs(
        wins=int((agreed > 0).sum()),
        ties=int((agreed == 0).sum()),
        losses=int((agreed < 0).sum()),
        win_rate=_interval(
            [both[0].question for both in complete], [(agreed + 1) / 2], lambda mean: mean, seed
        ),
        a_first=_counts(signs[:, 0]),
        b_first=_counts(signs[:, 1]),
        flips=int((signs[:, 0] != signs[:, 1]).sum()),
        unparsed=sum(verdict.value is None for both in verdicts for verdict in both),
        first_shown=_mean_of([verdict.value == verdict.side for verdict in decided]),
        longer=_mean_of(
            [(verdict.value == "A") == (verdict.lengths[0] > verdict.lengths[1]) for verdict in uneven]
        ),
        length_correlation=_correlation(longer_by, signs.mean(1) if len(signs) else np.zeros(0)),
    )


def ratings_of(ratings: Sequence[tuple[Judgment, Judgment]], *, seed: int = 0) -> Ratings:
    """Computes the statistics of ratings, each of A's and of B's answer to a turn."""
    complete = [both for both in ratings if all(rating.value is not None for rating in both)]
    scores = np.array([[rating.value for rating in both] for both in complete], dtype=np.float64).reshape(
        -1, 2
    )
    lengths = np.array([both[0].lengths for both in complete], dtype=np.float64).reshape(-1, 2)
    names = [both[0].question for both in complete]
    return Ratings(
        turns=len(complete),
        mean_a=_mean_of(scores[:, 0]),
        mean_b=_mean_of(scores[:, 1]),
        ratio=_interval(names, [scores[:, 0], scores[:, 1]], lambda a, b: a / b, seed),
        length_correlation=_correlation(lengths.ravel(), scores.ravel()),
        unparsed=sum(rating.value is None for both in ratings for rating in both),
    )


def _interval(
    names: Sequence[str], columns: Sequence[Array], statistic: Callable[..., Array], seed: int
) -> Interval:
    """Returns `statistic` of the columns' means, and its percentiles when questions are resampled with replacement.

    names: the question of each turn. columns: one value per turn."""
    if not names:
        return Interval(None)
    places = {name: i for i, name in enumerate(dict.fromkeys(names))}
    index = np.array([places[name] for name in names])
    sums = [np.bincount(index, column, len(places)) for column in columns]
    counts = np.bincount(index, minlength=len(places)).astype(np.float64)
    drawn = np.random.default_rng(seed).multinomial(len(places), [1 / len(places)] * len(places), RESAMPLES)
    weights = drawn.astype(np.float64)  # how often each question is in each resample
    resampled = statistic(*(weights @ total / (weights @ counts) for total in sums))
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(
        float(statistic(*(total.sum() / counts.sum() for total in sums))), float(low), float(high)
    )


def _sign(verdict: Judgment) -> float:
    return {"A": 1.0, "B": -1.0}.get(str(verdict.value), 0.0)


def _counts(signs: Array) -> tuple[int, int, int]:
    return int((signs > 0).sum()), int((signs == 0).sum()), int((signs < 0).sum())


def _mean_of(values: Sequence[bool] | Array) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _correlation(x: Array, y: Array) -> float | None:
    """Returns Pearson's correlation; None if one of the two does not vary."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def _table(name: str, rows: Sequence[tuple[str, object]]) -> str:
    return table((name, "value"), [(text, "-" if value is None else value) for text, value in rows])
