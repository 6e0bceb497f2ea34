"""Covering products: few cases that contain every pair of values of any two axes."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases such that every two values of two different axes meet in at least one of them (greedy)."""
    sizes = [range(len(a)) for a in axes]
    missing = {
        (i, x, j, y) for i, j in combinations(range(len(axes)), 2) for x, y in product(sizes[i], sizes[j])
    }
    everything = list(product(*sizes))
    cases = []
    while missing:
        best = max(everything, key=lambda case: sum(p in missing for p in _pairs(case)))
        cases.append(tuple(axis[i] for axis, i in zip(axes, best, strict=True)))
        missing -= set(_pairs(best))
    return cases


def _pairs(case: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    return [(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)]
