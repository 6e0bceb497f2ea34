"""Rows of several documents: each goes on as if it were alone, whatever comes, goes and waits beside it.

The truth is one forward over the whole packed rows, by plain float64 attention (tests/naive.py).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from headway.attention import attend_keys
from headway.cache import (
    POLICIES,
    CacheSpec,
    DecoderCache,
    KVCache,
    make_cache,
    slot_policy,
)
from headway.errors import CacheError
from headway.models import Decoder, build
from headway.patterns import Causal, Pattern, Window
from headway.positions import DynamicNTK, LongRope, Rotary
from headway.tokens import Tokens
from tests.cache.paged import Paged
from tests.generate.conftest import MIXED, small
from tests.laws.test_decode import DECODERS, D, H, K, decoder_patterns, piece
from tests.naive import naive
from tests.tolerance import assert_within_reference

Counts = list[dict[int, int]]


def packed_rows(lengths: list[list[int]]) -> tuple[Tensor, Tensor, Tensor, Tokens]:
    """q, k, v [B, heads, n, D] of documents side by side, and their tokens, some of them global."""
    tokens = Tokens.packed(lengths)
    tokens = replace(tokens, start=None, document=tokens.documents)
    marks = (torch.rand(tokens.index.shape) < 0.2) & tokens.valid
    q, k, v = (torch.randn(*tokens.index.shape, h, D, dtype=torch.float64).transpose(1, 2) for h in (H, K, K))
    return q, k, v, replace(tokens, is_global=marks)


def through(
    cache: KVCache,
    pattern: Pattern,
    rows: tuple[Tensor, Tensor, Tensor, Tokens],
    steps: list[Counts],
    backend: str,
) -> Tensor:
    """What the rows' queries see, chunk by chunk: [B, H, n, D], 0 where there is no token."""
    q, k, v, tokens = rows
    assert tokens.document is not None
    out = torch.zeros_like(q)
    at = {
        (b, d, i): slot
        for b, (documents, indices) in enumerate(
            zip(tokens.document.tolist(), tokens.index.tolist(), strict=True)
        )
        for slot, (d, i) in enumerate(zip(documents, indices, strict=True))
    }
    for counts in steps:
        chunk = cache.next_packed(counts)
        places = torch.full_like(chunk.index, -1)
        for b, t in chunk.valid.nonzero().tolist():
            places[b, t] = at[b, int(chunk.documents[b, t]), int(chunk.index[b, t])]
        chunk = replace(chunk, is_global=tokens.globals.gather(1, places.clamp_min(0)) & (places >= 0))
        keys = cache.update(piece(k, places), piece(v, places), chunk)
        part = attend_keys(piece(q, places), chunk, [keys], pattern, backend=backend).out
        b, t = (places >= 0).nonzero(as_tuple=True)
        out[b, :, places[b, t]] = part[b, :, t]
    return out


def truth(pattern: Pattern, rows: tuple[Tensor, Tensor, Tensor, Tokens]) -> Tensor:
    q, k, v, tokens = rows
    return naive(q, k, v, pattern, tokens, tokens)


@st.composite
def schedules(draw: st.DrawFn, lengths: list[list[int]]) -> list[Counts]:
    """Steps that bring each document to its length; in each, some documents go on by some tokens, in any order."""
    most = draw(st.sampled_from([1, 3, 30]))
    left = [dict(enumerate(row)) for row in lengths]
    steps = []
    while any(n for row in left for n in row.values()):
        step = []
        for row in left:
            going = draw(st.lists(st.sampled_from(sorted(row)), unique=True, max_size=len(row)))
            step.append({d: draw(st.integers(0, min(most, row[d]))) for d in going})
        if not any(n for row in step for n in row.values()):
            step = [{d: min(1, n) for d, n in row.items()} for row in left]
        left = [{d: n - new.get(d, 0) for d, n in row.items()} for row, new in zip(left, step, strict=True)]
        steps.append(step)
    return steps


@given(
    pattern=decoder_patterns,
    data=st.data(),
    kind=st.sampled_from(["auto", "growing"]),
    slack=st.integers(0, 2),
    backend=st.sampled_from(["auto", "dense", "banded"]),
)
def test_any_schedule_of_documents_equals_one_packed_forward(
    pattern: Pattern, data: st.DataObject, kind: str, slack: int, backend: str
) -> None:
    assume(pattern.is_causal)
    length = st.integers(1, 14)
    lengths = data.draw(st.lists(st.lists(length, min_size=1, max_size=3), min_size=1, max_size=2))
    rows = packed_rows(lengths)
    spec = CacheSpec(batch=len(lengths), kv_heads=K, head_dim=D, dtype=torch.float64)
    cache = make_cache(pattern, spec, slack=slack, kind=kind)
    got, want = through(cache, pattern, rows, data.draw(schedules(lengths)), backend), truth(pattern, rows)
    assert_within_reference(got, want, want, str(pattern))
    assert list(cache.documents) == [dict(enumerate(row)) for row in lengths]
    assert cache.bound is None or cache.slots <= cache.bound


@pytest.mark.parametrize("pattern", DECODERS, ids=str)
def test_packed_documents_equal_each_document_alone(pattern: Pattern) -> None:
    """Prompts that come one after the other while others decode; paged slots, and those of the pattern."""
    lengths = [30, 9, 17]
    rows = packed_rows([lengths])
    q, k, v, tokens = rows
    steps: list[Counts] = [[{0: 21}], *[[{0: 1, 1: 1}]] * 4, [{2: 11, 0: 1}], *[[{0: 1, 2: 1, 1: 1}]] * 3]
    steps += [[{1: 2, 0: 1, 2: 3}]]
    spec, policy = CacheSpec(batch=1, kv_heads=K, head_dim=D, dtype=torch.float64), slot_policy(pattern)
    paged = KVCache.of(Paged(policy.retention, page=3), spec)
    for cache in (KVCache.of(policy, spec), paged):
        out = through(cache, pattern, rows, steps, "auto")
        begin = 0
        for n in lengths:
            one = Tokens.range(n).with_global(tokens.globals[:, begin : begin + n])
            want = naive(*(x[:, :, begin : begin + n] for x in (q, k, v)), pattern, one, one)
            assert_within_reference(out[:, :, begin : begin + n], want, want)
            begin += n
        assert list(cache.documents) == [{0: 30, 1: 9, 2: 17}]


@pytest.mark.parametrize("kind", ["auto", "growing"])
def test_requests_that_come_and_go_use_the_slots_of_those_that_are_gone(kind: str) -> None:
    """A row as a server's pool: never more than three requests at once, a hundred in all, and no more slots than three
    can hold."""
    spec = CacheSpec(batch=1, kv_heads=1, head_dim=1)
    cache, live, longest = make_cache(Window.last(5), spec, kind=kind), {}, 12
    for request in range(100):
        live[request] = 3 + request % (longest - 2)
        x = torch.full((1, 1, live[request], 1), float(request))
        cache.update(x, x, cache.next_packed([{request: live[request]}]))
        x = torch.tensor([*live], dtype=torch.float32)[None, None, :, None]
        keys = cache.update(x, x, cache.next_packed([dict.fromkeys(live, 1)]))
        held = keys.tokens.valid[0]
        assert torch.equal(keys.k[0, 0, held, 0].long(), keys.tokens.documents[0, held])
        if len(live) == 3:
            done = next(iter(live))
            del live[done]
            cache.trim([{done: cache.documents[0][done]}])
    assert list(cache.documents[0]) == [98, 99]
    most = 3 * (longest + 3) if kind == "growing" else cache.bound * 3 // 2
    assert cache.slots <= most
    assert cache.capacity <= 2 * most


def test_rows_without_documents_are_as_before_once_the_documents_are_gone() -> None:
    """Document 0 goes on in order, so that fast kernels apply again."""
    cache = make_cache(Causal(), CacheSpec(batch=1, kv_heads=1, head_dim=1))

    def give(tokens: Tokens) -> Tokens:
        x = torch.zeros(1, 1, tokens.count, 1)
        return cache.update(x, x, tokens).tokens

    give(cache.next_tokens(4))
    assert give(cache.next_packed([{5: 3, 0: 1}])).start is None
    assert cache.lengths == (8,)
    cache.trim([{5: 3}])
    after = give(cache.next_tokens(1))
    assert (cache.documents[0], after.document) == ({0: 6}, None)
    cache.trim(2)
    assert give(cache.next_tokens(2)).start == 0


def forward(model: Decoder, cache: DecoderCache, counts: Counts, ids: dict[int, Tensor]) -> dict[int, Tensor]:
    """Logits of the next tokens of each document of one row."""
    begins, tokens = cache.documents[0], cache.next_packed(counts)
    parts = {d: ids[d][begins.get(d, 0) :][:n] for d, n in counts[0].items()}
    logits = model(torch.cat([*parts.values()])[None], tokens=tokens, cache=cache)[0]
    return dict(zip(parts, logits.split([len(part) for part in parts.values()]), strict=True))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("auto", None), ("auto", torch.int8), ("growing", None), ("paged", None)]
)
@pytest.mark.parametrize("scaling", ["none", "dynamic", "longrope"])
def test_a_model_decodes_packed_requests_as_each_alone(
    scaling: str, kind: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of several lengths in one row: logits equal those of a cache of its own for each, where frequencies
    move with the length of the request, too. A policy from outside is one more entry of POLICIES."""
    monkeypatch.setitem(POLICIES, "paged", Paged)
    model = small(MIXED)
    rope = {
        "none": None,
        "dynamic": DynamicNTK(4.0, 8),
        "longrope": LongRope((1.0,) * 4, (1.5, 2.0, 3.0, 4.0), trained_context=8, factor=4.0),
    }[scaling]
    other = build(replace(model.spec, positions=Rotary(100.0, pairing="halves", scaling=rope)), seed=3).eval()
    other.load_state_dict(model.state_dict())
    ids = {d: torch.randint(model.spec.vocab, (n,)) for d, n in ((4, 19), (0, 8), (9, 13))}
    cache, alone = (
        other.make_cache(1, kind=kind, dtype=dtype),
        {d: other.make_cache(1, dtype=dtype) for d in ids},
    )
    steps: list[dict[int, int]] = [
        {4: 9},
        {4: 1},
        {0: 7, 4: 2},
        {9: 6, 0: 1, 4: 1},
        {9: 1, 4: 5},
        {4: 1, 9: 6},
    ]
    with torch.no_grad():
        for step in steps:
            for d, got in forward(other, cache, [step], ids).items():
                begin = alone[d].lengths[0]
                want = other(ids[d][None, begin : begin + step[d]], cache=alone[d])[0]
                torch.testing.assert_close(got, want, rtol=0, atol=3e-5 * float(want.abs().max()))


ERRORS: dict[str, tuple[Any, str]] = {
    "next_tokens": (
        lambda cache: cache.next_tokens(1),
        "row 1 has the documents [0, 7]; say which continue, and by how many tokens: next_packed",
    ),
    "trim": (
        lambda cache: cache.trim(1),
        "row 1 has the documents [0, 7]; say how many tokens of each to forget",
    ),
    "trim too much": (
        lambda cache: cache.trim([0, {7: 3}]),
        "document 7 of row 1 has seen 2 tokens and cannot forget 3",
    ),
    "rows": (lambda cache: cache.next_packed([{}]), "for each of 2 rows, got [{}]"),
    "negative": (lambda cache: cache.next_packed([{}, {3: -1}]), "0 tokens or more, for each of 2 rows"),
    "total": (
        lambda cache: cache.next_packed([{}, {3: 4, 0: 1}], total=4),
        "a row needs 5 slots, but total is 4",
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_what_packed_rows_cannot_do_is_refused(what: str) -> None:
    cache = make_cache(Causal(), CacheSpec(batch=2, kv_heads=1, head_dim=1))
    x = torch.zeros(2, 1, 5, 1)
    cache.update(x, x, cache.next_packed([{0: 5}, {0: 3, 7: 2}]))
    call, message = ERRORS[what]
    with pytest.raises(CacheError, match=re.escape(message)):
        call(cache)
    assert list(cache.documents) == [{0: 5}, {0: 3, 7: 2}]


def test_a_ring_refuses_to_trim_the_document_that_has_gone_too_far() -> None:
    cache = make_cache(Window.last(3), CacheSpec(batch=1, kv_heads=1, head_dim=1), slack=1)
    x = torch.zeros(1, 1, 11, 1)
    cache.update(x, x, cache.next_packed([{2: 9, 6: 2}]))
    with pytest.raises(
        CacheError, match="document 2 of row 0 has seen 9 tokens and can forget at most 2 of them"
    ):
        cache.trim([{2: 3, 6: 1}])
    cache.trim([{2: 2, 6: 2}])
    assert list(cache.documents) == [{2: 7}]


def test_tokens_of_a_document_in_the_wrong_order_are_refused() -> None:
    cache = make_cache(Causal(), CacheSpec(batch=1, kv_heads=1, head_dim=1))
    tokens = Tokens(torch.tensor([[0, 0, 2]]), document=torch.tensor([[1, 4, 1]]))
    with pytest.raises(CacheError, match=re.escape("row 0 has indices [0, 0, 2] of documents [1, 4, 1]")):
        cache.update(torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 3, 1), tokens)
