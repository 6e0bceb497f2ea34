"""Which cases of a table a law is tried on in quick tests: a share of its own; slow ones try the whole table."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def share(
    names: str, cases: Iterable[Any], law: int, laws: int, always: Collection[Any] = ()
) -> pytest.MarkDecorator:
    """`parametrize` of arguments, or of the fixture "pair": case i is quick for the law of number i modulo `laws`, so
    that so many laws have seen every case; so are `always`, and all others are slow."""
    marked = [
        pytest.param(
            *(case if "," in names else (case,)),
            marks=() if i % laws == law or case in always else pytest.mark.slow,
        )
        for i, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(names, marked, indirect=names == "pair", ids=str)
