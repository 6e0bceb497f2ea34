"""Caches that store int8: the law of any split, the same bits whatever the split, and decoding through the kernels.

Results in float64 differ by the order of summation only: the tolerance is that of tests/cache/test_split.py.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.attention import KeyValues, attend
from headway.cache import CacheSpec, KVCache, make_cache
from headway.errors import CacheError
from headway.models import Decoder, build
from headway.native import loader as native
from headway.patterns import Causal, Window
from headway.positions import DynamicNTK, Rotary
from headway.quantization import quantize
from headway.tokens import Tokens
from tests.cache.oracle import CASES, KV_HEADS, SIZE, Case, Rows, W, attend_pairs, cuts
from tests.cache.test_cache import KINDS, draw, make
from tests.cache.test_split import EXACT, new_cache, poison, run, uniform
from tests.generate.conftest import small
from tests.naive import naive
from tests.tolerance import assert_within_reference

INT8 = torch.int8


def rounded(rows: Rows) -> Rows:
    """The rows with the keys and values that int8 makes of theirs."""
    plain = KeyValues(rows.k, rows.v, rows.tokens).quantized().dequantized(torch.float64)
    return replace(rows, k=plain.k, v=plain.v)


@pytest.mark.parametrize("n", [W, 3 * W + 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_split_equals_one_forward_over_what_is_stored(case: Case, n: int) -> None:
    rows = Rows.draw([n, n])
    full = rounded(rows).full(case)
    assert (full - rows.full(case)).abs().max() > 1e-4, "rounding can be seen"
    for slack, cut in [(i % 3, cut) for i, cut in enumerate(cuts(n))]:
        out = run(case, rows, uniform(cut, 2), slack=slack, dtype=INT8)
        torch.testing.assert_close(out, full, **EXACT, msg=lambda m, cut=cut: f"{cut}: {m}")


@pytest.mark.parametrize("side", ["left", "right", "between"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ragged_rows_equal_one_forward_over_what_is_stored(case: Case, side: str) -> None:
    lengths = [3 * W + 1, W, 1, 2 * W + 2]
    rows = Rows.draw(lengths, seed=1)
    steps = [[1 if n > i else 0 for n in lengths] for i in range(max(lengths))]
    for plan in ([lengths], steps):
        out = run(case, rows, plan, side=side, extra=1, dtype=INT8)
        torch.testing.assert_close(out, rounded(rows).full(case), **EXACT)


@pytest.mark.parametrize("kind", ["auto", "growing"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_split_stores_the_same_bits(case: Case, kind: str) -> None:
    """Token by token, whatever slot holds it; and they are those of the token rounded alone."""
    n = 3 * W + 2
    rows = Rows.draw([n, n])
    alone = [quantize(t) for t in (rows.k, rows.v)]
    for cut in cuts(n):
        cache, begin = new_cache(case, 2, kind=kind, dtype=INT8), 0
        for count in cut:
            _, k, v, tokens, _ = rows.chunk([begin] * 2, [count] * 2)
            cache.update(k, v, tokens)
            begin += count
        row, slot = (cache.table.tokens.index >= 0).nonzero(as_tuple=True)
        index = cache.table.tokens.index[row, slot]
        assert len(index) >= 2 * min(n, case.slots or n)
        k, v, k_scale, v_scale = cache.tensors
        stored = ((k, k_scale), (v, v_scale))
        for have, want in zip(stored, alone, strict=True):
            for mine, theirs in zip(have, want, strict=True):
                assert torch.equal(mine[row, :, slot], theirs[row, :, index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["auto", "growing"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decoding_through_the_kernels_is_dense_attention_over_what_is_stored(
    case: Case, kind: str, dtype: torch.dtype
) -> None:
    """A prompt of ragged rows, then step by step until rings have wrapped; empty slots hold NaN."""
    if native.library() is None:
        pytest.skip(f"no native kernels: {native.why_missing()}")
    lengths = [4 * W, 3 * W, 2 * W + 1]
    rows = Rows.draw(lengths, seed=2, dtype=torch.float32)
    cache = new_cache(case, 3, kind=kind, dtype=INT8)
    ends = [0] * 3
    for counts in ([W + 2, W, 1], *([1] * 3 for _ in range(2 * W - 2))):
        left = [min(n, end - at) for n, end, at in zip(counts, lengths, ends, strict=True)]
        q, k, v, tokens, _ = rows.chunk(ends, left)
        keys = cache.update(k.to(dtype), v.to(dtype), tokens)
        poison(cache)
        q = q.to(dtype)
        got = attend(
            q, keys.k, keys.v, case.pattern, q_tokens=tokens, k_tokens=keys.tokens, backend="native",
            k_scale=keys.k_scale, v_scale=keys.v_scale,
        )  # fmt: skip
        plain, exact = (keys.dequantized(d) for d in (dtype, torch.float64))
        seen = keys.tokens.valid[:, None, :, None]
        plain = KeyValues(plain.k.masked_fill(~seen, 0.0), plain.v.masked_fill(~seen, 0.0), keys.tokens)
        idle = ~tokens.valid[:, None, :, None]
        low = naive(q.masked_fill(idle, 0.0), plain.k, plain.v, case.pattern, tokens, keys.tokens)
        truth = attend_pairs(case, q, tokens, exact.k, exact.v, keys.tokens)
        assert_within_reference(got, truth, low)
        ends = list(cache.lengths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.bfloat16])
def test_bytes_and_dtypes(kind: str, given: torch.dtype) -> None:
    cache = make(kind, dtype=INT8)
    for count in (2, 9, 1):
        keys = cache.update(*draw(count, dtype=given), Tokens.range(count, start=cache.lengths[0]))
        assert keys.k.dtype == keys.v.dtype == cache.dtype == INT8
        assert [t.dtype for t in keys.scales] == [torch.float32] * 2
    assert cache.nbytes == cache.capacity * 2 * 2 * (4 + 3 + 4 + 4)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_rows_take_their_scales_along(kind: str) -> None:
    cache = make(kind, dtype=INT8)
    k, v = draw(7)
    k[1] *= 100
    before = cache.update(k, v, Tokens.range(7)).dequantized(torch.float32)
    copied = cache.fork()
    copied.reorder([1, 0, 1])
    k, v = draw(1, batch=3)
    after = copied.update(k, v, Tokens.range(1, start=7)).dequantized(torch.float32)
    index = after.tokens.index[0].tolist()
    for i in range(4, 7):
        assert torch.equal(after.k[:, :, index.index(i)], before.k[[1, 0, 1], :, i])
    cache.trim(1)
    again = cache.update(*draw(1), Tokens.range(1, start=6)).dequantized(torch.float32)
    assert torch.equal(again.k[:, :, again.tokens.index[0].tolist().index(5)], before.k[:, :, 5])


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_filled_in_inference_mode_can_go_on_outside(kind: str) -> None:
    with torch.inference_mode():
        cache = make(kind, dtype=INT8)
        cache.update(*draw(6), Tokens.range(6))
    keys = cache.update(*draw(1), Tokens.range(1, start=6))
    assert keys.dequantized(torch.float32).k.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_stays_in_its_token_and_head(kind: str) -> None:
    cache = make(kind, dtype=INT8)
    k, v = draw(3)
    k[0, 1, 1, 2] = float("inf")
    keys = cache.update(k, v, Tokens.range(3)).dequantized(torch.float32)
    assert keys.k[0, 1, 1].isnan().all()
    keys.k[0, 1, 1] = 0.0
    assert keys.k.isfinite().all()
    assert keys.v.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_rounded_is_refused(kind: str) -> None:
    cache = make(kind, dtype=INT8)
    whole = [t.to(torch.int64) for t in draw(1)]
    with pytest.raises(
        CacheError, match=r"k is torch.int64 on cpu, the cache rounds floating-point numbers to torch.int8"
    ):
        cache.update(*whole, Tokens.range(1))
    with pytest.raises(CacheError, match="k requires a gradient, and a cache holds none"):
        cache.update(draw(1)[0].requires_grad_(), draw(1)[1], Tokens.range(1))
    with pytest.raises(CacheError, match=re.escape("or as torch.int8, not as torch.int16")):
        make(kind, dtype=torch.int16)


def logits(model: Decoder, ids: Tensor, chunk: int, dtype: torch.dtype | None) -> Tensor:
    cache = model.make_cache(len(ids), dtype=dtype)
    with torch.no_grad():
        parts = [model(ids[:, at : at + chunk], cache=cache) for at in range(0, ids.shape[1], chunk)]
    return torch.cat(parts, 1)


def error(model: Decoder, ids: Tensor, chunk: int = 1) -> float:
    """Root mean square of what int8 changes in the logits, relative to their deviation."""
    want = logits(model, ids, chunk, None)
    return ((logits(model, ids, chunk, INT8) - want).pow(2).mean().sqrt() / want.std()).item()


PATTERNS = {"growing": (Causal(),), "ring": (Window.last(6),), "both": (Window.last(6), Causal())}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_model_with_an_int8_cache_stays_near_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is max / 127, so a rounded number errs by max / 127 / sqrt(12), some 0.6 % of the root mean square of a
    row of 8 (whose largest is at most 2.8 of them); a model of two layers is given five times that. With steps of
    max / 15 the same model is far outside."""
    model = small(PATTERNS[name])
    ids = torch.randint(model.spec.vocab, (2, 40))
    for chunk in (1, 7, 40):
        assert 1e-4 < error(model, ids, chunk) < 0.03
    monkeypatch.setattr("headway.quantization.LARGEST", 15)
    assert error(model, ids) > 0.03


def stretched() -> Decoder:
    """Angles that depend on the length: keys are turned when they are read."""
    model = small((Window.last(5), Causal()))
    positions = Rotary(100.0, pairing="halves", scaling=DynamicNTK(4.0, 16))
    other = build(replace(model.spec, positions=positions), seed=3).eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("make_model", [*(lambda p=p: small(p) for p in PATTERNS.values()), stretched])
def test_a_model_reads_the_numbers_that_are_stored(
    make_model: Callable[[], Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a float cache that is given them. Keys of float32 and their sums differ by nothing but the order."""
    model = make_model()
    ids = torch.randint(model.spec.vocab, (2, 40))
    got, update = logits(model, ids, 3, INT8), KVCache.update

    def rounding(self: KVCache, k: Tensor, v: Tensor, tokens: Tokens) -> KeyValues:
        plain = KeyValues(k, v, tokens).quantized().dequantized(k.dtype)
        return update(self, plain.k, plain.v, tokens)

    monkeypatch.setattr(KVCache, "update", rounding)
    torch.testing.assert_close(got, logits(model, ids, 3, None), rtol=0, atol=1e-4 * got.std().item())


def test_kinds_are_chosen_as_ever() -> None:
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": KV_HEADS, "head_dim": SIZE, "dtype": INT8}
    made = [make_cache(pattern, CacheSpec(**sizes)) for pattern in (Causal(), Window.last(3))]
    assert [cache.table.policy.name for cache in made] == ["growing", "ring"]
