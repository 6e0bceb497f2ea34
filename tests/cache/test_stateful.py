"""Caches against lists: whatever is appended, taken back, copied and reordered, in any order.

Every key and value of the run is a number of its own, so that what a cache returns can be looked up in the rows'
histories: nothing is lost, nothing is there twice, nothing is another row's. In int8 a row of one number, or of
two of the same size, is that number again after rounding.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from unittest import TestCase

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headway.attention import KeyValues
from headway.cache import Cache, GrowingCache, RingCache
from headway.errors import CacheError
from headway.tokens import Tokens
from tests.cache.test_split import poison

REACH, SINKS, SLACK = 4, 2, 2
RING = REACH + 1 + SLACK


@dataclass
class Token:
    number: int
    is_global: bool
    position: int


@dataclass
class Row:
    """What a row is: its tokens, and the length up to which it has come since it was last cut to its sinks."""

    tokens: list[Token]
    highest: int = 0

    def append(self, token: Token) -> None:
        self.tokens.append(token)
        self.highest = max(self.highest, len(self.tokens))

    def may_trim_to(self, end: int, cache: Cache) -> bool:
        """Only what lies in the ring behind the highest index can be gone."""
        if isinstance(cache, GrowingCache) or end <= SINKS:
            return True
        return self.highest - RING <= max(SINKS, end - REACH)

    def trim_to(self, end: int) -> None:
        del self.tokens[end:]
        self.highest = end if end <= SINKS else self.highest


class CacheMachine(RuleBasedStateMachine):
    """A cache, the rows that it should be, and one forked pair that waits."""

    globals = False
    dtype = torch.float32

    def make(self) -> Cache:
        return RingCache(
            reach=REACH,
            sinks=SINKS,
            slack=SLACK,
            globals=self.globals,
            batch=2,
            kv_heads=1,
            head_dim=1,
            value_dim=2,
            dtype=self.dtype,
        )

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.rows, self.number = self.make(), [Row([]), Row([])], 0
        self.other: tuple[Cache, list[Row]] | None = None

    @rule(data=st.data(), width=st.integers(0, 2 * RING), side=st.sampled_from(["left", "right"]))
    def append(self, data: Any, width: int, side: str) -> None:
        batch = len(self.rows)
        counts = data.draw(
            st.lists(st.integers(0, width), min_size=batch, max_size=batch) | st.just([width] * batch)
        )
        marked = data.draw(st.booleans())
        placed = data.draw(st.booleans())
        before = [len(row.tokens) for row in self.rows]
        index, number, position = (torch.full((batch, width), -1) for _ in range(3))
        is_global = torch.zeros(batch, width, dtype=torch.bool)
        for b, n in enumerate(counts):
            for c in range(n):
                at = c if side == "right" else width - n + c
                self.number += 1
                here = len(self.rows[b].tokens)
                token = Token(self.number, marked and self.number % 3 == 0, 1000 + here if placed else here)
                self.rows[b].append(token)
                index[b, at], number[b, at] = here, self.number
                is_global[b, at], position[b, at] = token.is_global, token.position
        regular = set(counts) == {width} and len(set(before)) == 1 and data.draw(st.booleans())
        tokens = Tokens(
            index,
            is_global=is_global if marked else None,
            position=position if placed else None,
            start=before[0] if regular else None,
        )
        k = number[:, None, :, None].float()
        keys = self.cache.update(k, torch.cat([k, -k], -1), tokens)
        self.check(keys, before)

    def check(self, keys: KeyValues, before: list[int]) -> None:
        """Row by row: right content, no duplicates, and all that the chunk's queries may see."""
        assert keys.k.dtype == self.dtype
        keys = keys.dequantized(torch.float32)
        tokens = keys.tokens
        index = tokens.index.expand(len(self.rows), -1)
        for b, row in enumerate(self.rows):
            held = {}
            for slot, i in enumerate(index[b].tolist()):
                if i < 0:
                    continue
                assert i not in held
                assert i < len(row.tokens)
                held[i] = (
                    round(keys.k[b, 0, slot, 0].item()),
                    bool(tokens.globals.expand(len(self.rows), -1)[b, slot]),
                    int(tokens.positions.expand(len(self.rows), -1)[b, slot]),
                )
                assert [round(x) for x in keys.v[b, 0, slot].tolist()] == [held[i][0], -held[i][0]]
            for i, token in enumerate(row.tokens):
                kept = isinstance(self.cache, GrowingCache) or i < SINKS or i >= before[b] - REACH
                if kept or (self.globals and token.is_global):
                    assert i in held, f"row {b} lost token {i} of {len(row.tokens)}"
                if i in held:
                    assert held[i] == (token.number, token.is_global, token.position)
        if tokens.start is not None:
            assert torch.equal(index, Tokens.range(tokens.count, tokens.start).index.expand_as(index))

    @rule(data=st.data(), each=st.booleans())
    def trim(self, data: Any, each: bool) -> None:
        lengths = [len(row.tokens) for row in self.rows]
        if each:
            n: Any = [data.draw(st.integers(0, length)) for length in lengths]
        else:
            n = data.draw(st.integers(0, min([*lengths, SLACK + 2])))
        ends = [length - c for length, c in zip(lengths, n if each else [n] * len(lengths), strict=True)]
        if all(row.may_trim_to(end, self.cache) for row, end in zip(self.rows, ends, strict=True)):
            self.cache.trim(torch.tensor(n) if each and n else n)
            for row, end in zip(self.rows, ends, strict=True):
                row.trim_to(end)
        else:
            with pytest.raises(CacheError, match="has overwritten keys that the tokens before them need"):
                self.cache.trim(n)

    @rule()
    def fork(self) -> None:
        self.other = (self.cache.fork(), copy.deepcopy(self.rows))

    @precondition(lambda self: self.other is not None)
    @rule()
    def change_over(self) -> None:
        assert self.other is not None
        (self.cache, self.rows), self.other = self.other, (self.cache, self.rows)

    @rule(data=st.data())
    def reorder(self, data: Any) -> None:
        rows = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=3))
        self.cache.reorder(torch.tensor(rows))
        self.rows = [copy.deepcopy(self.rows[r]) for r in rows]

    @rule()
    def poison(self) -> None:
        for cache in [self.cache] + ([self.other[0]] if self.other else []):
            poison(cache)

    @invariant()
    def knows_its_lengths(self) -> None:
        assert self.cache.length.tolist() == [len(row.tokens) for row in self.rows]

    @invariant()
    def keeps_its_bound(self) -> None:
        if isinstance(self.cache, RingCache):
            pinned = max(sum(t.is_global for t in row.tokens[SINKS:]) for row in self.rows)
            assert self.cache.bound == SINKS + RING + (pinned if self.globals else 0)
            assert self.cache.slots <= self.cache.bound
            if not self.globals:
                assert self.cache.capacity <= self.cache.bound


class PinningMachine(CacheMachine):
    globals = True


class GrowingMachine(CacheMachine):
    def make(self) -> Cache:
        return GrowingCache(batch=2, kv_heads=1, head_dim=1, value_dim=2, dtype=self.dtype)


class Int8PinningMachine(PinningMachine):
    dtype = torch.int8


class Int8GrowingMachine(GrowingMachine):
    dtype = torch.int8


def quick(machine: type[CacheMachine]) -> type[TestCase]:
    """Its test, which reports a failure as it was found, in seconds: to shrink the steps takes minutes, and the
    assertions name row and token. The steps are printed; add Phase.shrink for fewer of them."""
    case: type[TestCase] = machine.TestCase
    case.settings = settings(case.settings, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # type: ignore[attr-defined]
    return case


TestRing = quick(CacheMachine)
TestRingWithGlobals = quick(PinningMachine)
TestGrowing = quick(GrowingMachine)
TestInt8RingWithGlobals = quick(Int8PinningMachine)
TestInt8Growing = quick(Int8GrowingMachine)
