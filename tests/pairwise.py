"""Covering products: few cases that contain every pair of values of any two axes, or every value of each."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases such that every two values of two different axes meet in at least one of them: greedily, the first of those
    with the most pairs that are missing yet."""
    every = np.indices([len(axis) for axis in axes]).reshape(len(axes), -1)
    missing = {
        (i, j): np.ones((len(axes[i]), len(axes[j])), bool) for i, j in combinations(range(len(axes)), 2)
    }
    cases = []
    while any(pairs.any() for pairs in missing.values()):
        best = every[
            :, sum(pairs[every[i], every[j]].astype(int) for (i, j), pairs in missing.items()).argmax()
        ]
        cases.append(tuple(axis[i] for axis, i in zip(axes, best, strict=True)))
        for (i, j), pairs in missing.items():
            pairs[best[i], best[j]] = False
    return cases


def chequered(names: str, *axes: Sequence[Any], of: int = 2) -> pytest.MarkDecorator:
    """`parametrize` of a product: quick are the cases whose places in the axes sum to a multiple of `of`, so that each
    value is met, beside others each time; all other cases are slow."""
    places = product(*map(range, map(len, axes)))
    cases = [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, place, strict=True)),
            marks=pytest.mark.slow if sum(place) % of else (),
        )
        for place in places
    ]
    return pytest.mark.parametrize(names, cases, ids=lambda value: getattr(value, "__name__", str(value)))
