"""Caches against lists: whatever is appended, taken back, copied and reordered, in any order.

Every key and value of the run is a number of its own, so that what a cache returns can be looked up in the histories of
the rows' documents: nothing is lost, nothing is there twice, nothing is another document's. In int8 a row of one
number, or of two of the same size, is that number again after rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import TestCase

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headway.attention import KeyValues
from headway.cache import (
    CacheSpec,
    DecoderCache,
    Growing,
    KVCache,
    Ring,
    SequenceLengths,
    SlotPolicy,
    SlotTable,
)
from headway.errors import CacheError
from headway.patterns import Retention
from headway.tokens import Tokens
from tests.cache.paged import Paged
from tests.cache.test_split import poison

REACH, SINKS, SLACK = 4, 2, 2
RING = REACH + 1 + SLACK


@dataclass
class Token:
    number: int
    is_global: bool
    position: int


@dataclass
class Sequence:
    """What a document is: its tokens, and the length up to which it has come since it was last cut to its sinks."""

    tokens: list[Token] = field(default_factory=list)
    highest: int = 0

    def append(self, token: Token) -> None:
        self.tokens.append(token)
        self.highest = max(self.highest, len(self.tokens))

    def may_trim_to(self, end: int, policy: SlotPolicy) -> bool:
        """Only what lies in the ring behind the highest index can be gone."""
        if policy.retention.reach is None or end <= SINKS:
            return True
        return self.highest - RING <= max(SINKS, end - REACH)

    def trim_to(self, end: int) -> None:
        del self.tokens[end:]
        self.highest = end if end <= SINKS else self.highest


Row = dict[int, Sequence]


class CacheMachine(RuleBasedStateMachine):
    """Two layers that share a table, the rows that they should be, and one forked pair that waits."""

    policy: SlotPolicy = Ring(Retention(REACH, SINKS), SLACK)
    documents: tuple[int, ...] = (0,)
    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        table = SlotTable(self.policy, SequenceLengths(2))
        spec = CacheSpec(batch=2, kv_heads=1, head_dim=1, value_dim=2, dtype=self.dtype)
        self.cache, self.number = DecoderCache(KVCache(spec, table) for _ in range(2)), 0
        self.rows: list[Row] = [{d: Sequence() for d in self.documents} for _ in range(2)]
        self.other: tuple[DecoderCache, list[Row]] | None = None

    @rule(data=st.data(), width=st.integers(0, 2 * RING), side=st.sampled_from(["left", "right"]))
    def append(self, data: Any, width: int, side: str) -> None:
        batch = len(self.rows)
        counts = data.draw(
            st.lists(st.integers(0, width), min_size=batch, max_size=batch) | st.just([width] * batch)
        )
        marked = data.draw(st.booleans())
        placed = data.draw(st.booleans())
        mixed = len(self.documents) > 1 and data.draw(st.booleans())
        index, number, position, document = (torch.full((batch, width), -1) for _ in range(4))
        is_global = torch.zeros(batch, width, dtype=torch.bool)
        before = [{d: len(s.tokens) for d, s in row.items()} for row in self.rows]
        for b, n in enumerate(counts):
            which = data.draw(st.lists(st.sampled_from(self.documents), min_size=n, max_size=n))
            for c, d in enumerate(which if mixed else sorted(which)):
                at = c if side == "right" else width - n + c
                self.number += 1
                here = len(self.rows[b][d].tokens)
                token = Token(self.number, marked and self.number % 3 == 0, 1000 + here if placed else here)
                self.rows[b][d].append(token)
                index[b, at], number[b, at], document[b, at] = here, self.number, d
                is_global[b, at], position[b, at] = token.is_global, token.position
        alike = self.documents == (0,) and set(counts) == {width} and all(row == before[0] for row in before)
        tokens = Tokens(
            index,
            document=None if self.documents == (0,) else document,
            is_global=is_global if marked else None,
            position=position if placed else None,
            start=before[0][0] if alike and data.draw(st.booleans()) else None,
        )
        k = number[:, None, :, None].float()
        keys, negative = (
            layer.update(sign * k, sign * torch.cat([k, -k], -1), tokens)
            for layer, sign in zip(self.cache.layers, (1, -1), strict=True)
        )
        empty = ~keys.tokens.valid.expand(batch, -1)[:, None, :, None]
        for one, other in ((keys.k, negative.k), (keys.v, negative.v)):
            assert torch.equal(one.masked_fill(empty, 0), -other.masked_fill(empty, 0))
        self.check(keys, before)

    def check(self, keys: KeyValues, before: list[dict[int, int]]) -> None:
        """Document by document: right content, no duplicates, and all that the chunk's queries may see."""
        assert keys.k.dtype == self.dtype
        keys = keys.dequantized(torch.float32)
        tokens, batch = keys.tokens, len(self.rows)
        index, document, is_global, position = (
            t.expand(batch, -1).tolist()
            for t in (tokens.index, tokens.documents, tokens.globals, tokens.positions)
        )
        for b, row in enumerate(self.rows):
            held: dict[tuple[int, int], Token] = {}
            for slot, i in enumerate(index[b]):
                if i < 0:
                    continue
                d = document[b][slot]
                assert (d, i) not in held
                assert i < len(row[d].tokens)
                number = round(keys.k[b, 0, slot, 0].item())
                held[d, i] = Token(number, is_global[b][slot], position[b][slot])
                assert [round(x) for x in keys.v[b, 0, slot].tolist()] == [number, -number]
            for d, i, token in self.every_token(row):
                kept = self.policy.retention.reach is None or i < SINKS or i >= before[b][d] - REACH
                if kept or (self.policy.retention.globals and token.is_global):
                    assert (d, i) in held, f"row {b} lost token {i} of {len(row[d].tokens)} of document {d}"
                if (d, i) in held:
                    assert held[d, i] == token
        if tokens.start is not None:
            assert index == [list(range(tokens.start, tokens.start + tokens.count))] * batch

    @staticmethod
    def every_token(row: Row) -> Iterator[tuple[int, int, Token]]:
        return ((d, i, token) for d, sequence in row.items() for i, token in enumerate(sequence.tokens))

    @rule(data=st.data(), each=st.booleans())
    def trim(self, data: Any, each: bool) -> None:
        lengths = [{d: len(s.tokens) for d, s in row.items()} for row in self.rows]
        if each or len(self.documents) > 1:
            many = [{d: data.draw(st.integers(0, n)) for d, n in row.items()} for row in lengths]
            n: Any = many if len(self.documents) > 1 else torch.tensor([row[0] for row in many])
        else:
            n = data.draw(st.integers(0, min(SLACK + 2, *(row[0] for row in lengths))))
            many = [{0: n}] * len(lengths)
        ends = [
            {d: have - less[d] for d, have in row.items()} for row, less in zip(lengths, many, strict=True)
        ]
        pairs = [(row[d], end) for row, some in zip(self.rows, ends, strict=True) for d, end in some.items()]
        if all(sequence.may_trim_to(end, self.policy) for sequence, end in pairs):
            self.cache.trim(n)
            for sequence, end in pairs:
                sequence.trim_to(end)
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
            for layer in cache.layers:
                poison(layer)

    @invariant()
    def knows_its_lengths(self) -> None:
        have = [{d: len(s.tokens) for d, s in row.items() if s.tokens} for row in self.rows]
        assert list(self.cache.documents) == have
        assert self.cache.length.tolist() == [sum(row.values()) for row in have]

    @invariant()
    def keeps_its_bound(self) -> None:
        if self.policy.retention.reach is None:
            return
        layer, pins = self.cache[0], self.policy.retention.globals
        most = [
            max(1, sum(bool(s.tokens) for s in row.values())) * (SINKS + RING)
            + sum(token.is_global for _, i, token in self.every_token(row) if i >= SINKS and pins)
            for row in self.rows
        ]
        assert layer.bound == max(most)
        assert layer.slots <= layer.bound
        if not pins and self.documents == (0,):
            assert layer.capacity <= layer.bound


PINNING = Retention(REACH, SINKS, globals=True)


class PinningMachine(CacheMachine):
    policy = Ring(PINNING, SLACK)


class GrowingMachine(CacheMachine):
    policy = Growing()


class Int8PinningMachine(PinningMachine):
    dtype = torch.int8


class Int8GrowingMachine(GrowingMachine):
    dtype = torch.int8


class PackedPinningMachine(PinningMachine):
    documents = (0, 3, 1000)


class PackedGrowingMachine(GrowingMachine):
    documents = (2, 5)


class PagedMachine(PackedPinningMachine):
    policy = Paged(PINNING, SLACK, page=3)


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
TestPackedRingWithGlobals = quick(PackedPinningMachine)
TestPackedGrowing = quick(PackedGrowingMachine)
TestPaged = quick(PagedMachine)
