"""What follows from a pattern and the tokens of both sides, computed once: plans, masks, arrays for kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary, ref

import torch

from headway.patterns import Pattern
from headway.patterns.program import simplify
from headway.tokens import Tokens

Made = TypeVar("Made")
More = TypeVarTuple("More")

OTHERS = 8
"""Values kept for the same tokens of the queries, where data must be looked at."""


class TokensMemo(Generic[Made, *More]):
    """`make(pattern, q, k, ...)`, remembered.

    Where `Tokens.static_key` says all, by it and the number of rows; for other tokens for as long as these very tokens
    live unchanged, so that the layers of a model, and forward and backward, share one value. In a graph that is
    traced nothing is remembered. Of the former `most` values are kept; when there are more, all are dropped.
    """

    def __init__(self, make: Callable[[Pattern, Tokens, Tokens, *More], Made], most: int = 64) -> None:
        self._make, self._most = make, most
        self._static: dict[Hashable, tuple[Hashable, Made]] = {}
        self.others: WeakKeyDictionary[Tokens, dict[Hashable, tuple[Hashable, Made]]] = WeakKeyDictionary()

    def __call__(self, pattern: Pattern, q: Tokens, k: Tokens, *more: *More) -> Made:
        if torch.compiler.is_compiling():
            return self._make(pattern, q, k, *more)
        key: Hashable = (pattern, q.static_key, k.static_key, q.index.shape, k.index.shape, q.device, more)
        versions: tuple[Hashable, Hashable] = ((), ())
        known, most = self._static, self._most
        if q.static_key is None or k.static_key is None:
            key, versions = (pattern, ref(k), more), (q.versions, k.versions)
            known, most = self.others.setdefault(q, {}), OTHERS
        found = known.get(key)
        if found is not None and found[0] == versions:
            return found[1]
        with torch.inference_mode(False):
            made = self._make(pattern, q, k, *more)
        if None not in versions:
            if len(known) >= most:
                known.clear()
            known[key] = versions, made
        return made


simplified = TokensMemo(simplify, most=512)
"""`simplify`, remembered."""
