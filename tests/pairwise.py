"""Covering arrays: few cases that contain every pair of values of any two axes, or every value of each."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns cases such that any two values of two different axes occur together in at least one case. Greedy: each
    next case is the first with the most pairs that are still missing."""
    all_cases = np.indices([len(axis) for axis in axes]).reshape(len(axes), -1)
    missing = {
        (i, j): np.ones((len(axes[i]), len(axes[j])), bool) for i, j in combinations(range(len(axes)), 2)
    }
    cases = []
    while any(pairs.any() for pairs in missing.values()):
        best = all_cases[
            :,
            sum(pairs[all_cases[i], all_cases[j]].astype(int) for (i, j), pairs in missing.items()).argmax(),
        ]
        cases.append(tuple(axis[i] for axis, i in zip(axes, best, strict=True)))
        for (i, j), pairs in missing.items():
            pairs[best[i], best[j]] = False
    return cases


def chequered(names: str, *axes: Sequence[Any], of: int = 2) -> pytest.MarkDecorator:
    """Returns `parametrize` over a product. Cases whose indices in the axes sum to a multiple of `of` are quick, so
    that each value occurs, with different values of other axes; all other cases are slow."""
    places = product(*map(range, map(len, axes)))
    cases = [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, place, strict=True)),
            marks=pytest.mark.slow if sum(place) % of else (),
        )
        for place in places
    ]
    return pytest.mark.parametrize(names, cases, ids=lambda value: getattr(value, "__name__", str(value)))
