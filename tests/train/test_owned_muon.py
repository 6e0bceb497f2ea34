"""Which process orthogonalises which matrix; its work is a product of the matrix with its own transpose."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.train.sharded_step import owners_of

SHAPES = st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), max_size=24)


@given(SHAPES, st.integers(1, 9))
def test_the_busiest_has_at_most_one_matrix_more_than_the_idlest(
    shapes: list[tuple[int, int]], count: int
) -> None:
    """Then no process has more than the mean plus one matrix."""
    owners, work = owners_of(shapes, count), [prod(shape) * min(shape) for shape in shapes]
    assert len(owners) == len(shapes)
    load = [sum(w for w, owner in zip(work, owners, strict=True) if owner == rank) for rank in range(count)]
    assert sum(load) == sum(work), "each has one owner"
    assert max(load) - min(load) <= max(work, default=0)


@pytest.mark.parametrize(
    ("shapes", "count", "owners"),
    [
        ([], 3, []),
        ([(4, 4)] * 5, 1, [0] * 5),
        ([(4, 4)] * 5, 2, [0, 1, 0, 1, 0]),
        ([(2, 2), (4, 4), (8, 8), (4, 4), (4, 4)], 2, [1, 1, 0, 1, 1]),
        ([(8, 8), (2, 32), (4, 16), (6, 10)], 2, [0, 1, 1, 1]),
        ([(3, 3), (5, 2), (2, 2)], 4, [1, 0, 2]),
    ],
)
def test_the_largest_go_first_each_to_who_has_least(
    shapes: list[tuple[int, int]], count: int, owners: list[int]
) -> None:
    assert owners_of(shapes, count) == owners
