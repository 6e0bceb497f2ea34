"""Shares of a table of cases: in quick tests, each law is tried on its own share; slow tests try the whole table."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def share(
    names: str, cases: Iterable[Any], law: int, laws: int, always: Collection[Any] = ()
) -> pytest.MarkDecorator:
    """Returns a `parametrize` of arguments, or of the fixture "pair": case i is quick for law number i modulo `laws`,
    so that all laws together see every case; the cases in `always` are quick for every law, all others are slow."""
    marked = [
        pytest.param(
            *(case if "," in names else (case,)),
            marks=() if i % laws == law or case in always else pytest.mark.slow,
        )
        for i, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(names, marked, indirect=names == "pair", ids=str)
