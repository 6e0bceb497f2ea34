"""The order of rows: a permutation for each (seed, epoch), with no state but the number of rows read."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.data import Permutation, rows_from
from headway.errors import DataError


@given(st.integers(0, 2**63), st.integers(0, 1000), st.integers(1, 700))
def test_it_is_a_permutation(seed: int, epoch: int, size: int) -> None:
    assert sorted(map(Permutation(seed, epoch, size), range(size))) == list(range(size))


@given(st.integers(-(2**31), 2**63), st.integers(1, 300), st.lists(st.integers(1, 50), max_size=12))
def test_any_steps_from_any_place_read_the_same(seed: int, size: int, steps: list[int]) -> None:
    """Stopping, and resuming at the number of rows read, changes nothing."""
    total = sum(steps)
    whole, parts = rows_from(seed, 0, total, size), list[int]()
    for step in steps:
        parts += rows_from(seed, len(parts), step, size)
    assert parts == whole
    for epoch in range(total // size):
        assert sorted(whole[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(map(Permutation(seed, epoch, 50), range(50))) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_every_row_is_as_likely_everywhere(size: int) -> None:
    """Chi-square of where a row lands over 4000 seeds; the bound is mean + 5 standard deviations of the statistic."""
    for index in range(size):
        counts = Counter(Permutation(seed, 0, size)(index) for seed in range(4000))
        expected = 4000 / size
        statistic = sum((counts[row] - expected) ** 2 / expected for row in range(size))
        freedom = size - 1
        assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_small_permutations_all_occur() -> None:
    counts = Counter(tuple(map(Permutation(seed, 0, 3), range(3))) for seed in range(3000))
    assert len(counts) == 6
    assert all(400 < n < 600 for n in counts.values())  # 500 expected, deviation 20


def test_a_pinned_order() -> None:
    """Runs that were started with an older version go on in the same order."""
    assert list(map(Permutation(1, 2, 10), range(10))) == PINNED


PINNED = [6, 3, 9, 0, 4, 2, 7, 8, 5, 1]


def test_what_cannot_be() -> None:
    with pytest.raises(DataError, match="size must be 1 or more, epoch 0 or more; got 0 and 0"):
        Permutation(0, 0, 0)
    with pytest.raises(DataError, match="index 10 is outside the epoch's 10 rows"):
        Permutation(0, 0, 10)(10)
