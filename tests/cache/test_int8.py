"""Caches that store int8: the same bits however tokens are split, and decoding through the kernels."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headway.attention import KeyValues
from headway.cache import BatchCache, CacheSpec, PagedCache, PagedLayer
from headway.cache.paged_step import places, stored_keys
from headway.models import Decoder, build
from headway.patterns import Causal, Pattern, Sink, Window
from headway.positions import DynamicNTK, Rotary
from headway.quantization import quantize
from headway.tokens import Tokens
from tests.cache.layers import attended
from tests.generate.conftest import small
from tests.laws.test_decode import piece
from tests.naive import naive
from tests.native.presence import needs_kernels
from tests.tolerance import assert_within_reference

INT8 = torch.int8
N, K, D = 90, 2, 6
CASES = [Causal(), Window.last(9), Window.last(5, step=4) | (Causal() & Sink(2))]
SPLITS = [[N], [1] * N, [70, 1, 1, 18], [30] * 3]


def drawn(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns q [2, 4, N, D], k and v [2, K, N, D]."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(2, h, N, D, dtype=torch.float64, generator=source).to(dtype) for h in (4, K, K)]


def new_cache(pattern: Pattern, batch: int = 2) -> BatchCache:
    return BatchCache(PagedCache(CacheSpec(kv_heads=K, head_dim=D, dtype=INT8), [pattern]), batch)


def stored(cache: BatchCache) -> KeyValues:
    """Returns the codes and scales of the one layer, in the order of their places."""
    layer = cache.pages[0]
    assert isinstance(layer, PagedLayer)
    return stored_keys(layer.tensors, places(cache.tables, 0, cache.device)).gathered()


@pytest.mark.parametrize("pattern", CASES, ids=str)
def test_any_split_equals_one_forward_over_what_is_stored(pattern: Pattern) -> None:
    q, k, v = drawn()
    plain, at = KeyValues(k, v, Tokens.range(N)).quantized().dequantized(torch.float64), Tokens.range(N)
    full = naive(q, plain.k, plain.v, pattern, at, at)
    assert (full - naive(q, k, v, pattern, at, at)).abs().max() > 1e-4, "rounding can be seen"
    for split in SPLITS:
        cache = new_cache(pattern)
        parts = zip(*(t.split(split, 2) for t in (q, k, v)), strict=True)
        out = [attended(cache, cache.next_tokens(part[0].shape[2]), *part, pattern) for part in parts]
        torch.testing.assert_close(torch.cat(out, 2), full, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pattern", CASES, ids=str)
def test_every_split_stores_the_same_bits(pattern: Pattern) -> None:
    """They are the bits of each token rounded alone."""
    q, k, v = drawn()
    alone = [quantize(t) for t in (k, v)]
    for split in SPLITS:
        cache = new_cache(pattern)
        for part in zip(*(t.split(split, 2) for t in (q, k, v)), strict=True):
            attended(cache, cache.next_tokens(part[0].shape[2]), *part, pattern)
        keys = stored(cache)
        valid = keys.tokens.valid[0]
        row, index = keys.tokens.documents[0, valid], keys.tokens.index[0, valid]
        assert len(index) >= 2 * (pattern.retention.reach or N)
        assert keys.k_scale is not None
        assert keys.v_scale is not None
        for (codes, scales), (expected_codes, expected_scales) in zip(
            ((keys.k, keys.k_scale), (keys.v, keys.v_scale)), alone, strict=True
        ):
            assert torch.equal(codes[0][:, valid].transpose(0, 1), expected_codes[row, :, index])
            assert torch.equal(scales[0][:, valid].T, expected_scales[row, :, index])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", CASES, ids=str)
def test_decoding_through_the_kernels_is_dense_attention_over_what_is_stored(
    pattern: Pattern, dtype: torch.dtype
) -> None:
    """Prompts of two lengths, then step by step until pages have been released; every other step has no token of the
    second row. Empty slots are given NaN, return 0, and change nothing that is stored."""
    q, k, v = drawn(2, dtype)
    cache = new_cache(pattern)
    for counts in ((60, 53), *[(1, 1), (1, 0)] * 10):
        tokens = cache.next_tokens(max(counts), counts)
        at = tokens.index.expand(2, -1)
        actual = attended(cache, tokens, *(piece(t, at) for t in (q, k, v)), pattern, "native")
        index, ends = torch.arange(N), torch.tensor(cache.lengths).view(2, 1)
        plain = KeyValues(k, v, Tokens(torch.where(index < ends, index, -1))).quantized()
        low, exact = (plain.dequantized(d) for d in (dtype, torch.float64))
        queries = piece(q, at).nan_to_num(0.0)
        truth = naive(queries.double(), exact.k, exact.v, pattern, tokens, plain.tokens)
        assert_within_reference(actual, truth, naive(queries, low.k, low.v, pattern, tokens, plain.tokens))


def test_bytes_copies_and_rows_take_their_scales_along() -> None:
    cache = new_cache(Causal())
    q, k, v = drawn()
    k[1] *= 100
    attended(cache, cache.next_tokens(N), q, k, v, Causal())
    assert cache.nbytes == 2 * 2 * 64 * K * 2 * (D + 4)
    before, copied = stored(cache).dequantized(torch.float32), cache.fork()
    copied.reorder([1, 0, 1])
    attended(copied, copied.next_tokens(1), *(t[[0, 1, 0], :, :1] for t in (q, k, v)), Causal())
    after = stored(copied).dequantized(torch.float32)
    keys_of = {b: before.k[0][:, (before.tokens.documents[0] == b) & before.tokens.valid[0]] for b in (0, 1)}
    for b, parent in enumerate((1, 0, 1)):
        keys = after.k[0][:, (after.tokens.documents[0] == b) & after.tokens.valid[0]]
        assert torch.equal(keys[:, :N], keys_of[parent])


def test_a_fault_stays_in_its_token_and_head() -> None:
    cache = new_cache(Causal())
    q, k, v = (t[:, :, :3].clone() for t in drawn())
    k[0, 1, 1, 2] = float("inf")
    attended(cache, cache.next_tokens(3), q, k, v, Causal())
    keys = stored(cache)
    at = ((keys.tokens.documents[0] == 0) & (keys.tokens.index[0] == 1)).nonzero()[0, 0]
    valid, plain = keys.tokens.valid[0], keys.dequantized(torch.float32)
    assert plain.k[0, 1, at].isnan().all()
    plain.k[0, 1, at] = 0.0
    assert plain.k[0][:, valid].isfinite().all()
    assert plain.v[0][:, valid].isfinite().all()


def logits(model: Decoder, ids: Tensor, chunk: int, dtype: torch.dtype | None) -> Tensor:
    cache = model.make_cache(len(ids), dtype=dtype)
    with torch.no_grad():
        parts = [model(ids[:, at : at + chunk], cache=cache) for at in range(0, ids.shape[1], chunk)]
    return torch.cat(parts, 1)


def error(model: Decoder, ids: Tensor, chunk: int = 1) -> float:
    """Returns the root mean square of what int8 changes in the logits, relative to their standard deviation."""
    exact = logits(model, ids, chunk, None)
    return ((logits(model, ids, chunk, INT8) - exact).pow(2).mean().sqrt() / exact.std()).item()


PATTERNS = {"growing": (Causal(),), "window": (Window.last(6),), "both": (Window.last(6), Causal())}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_model_with_an_int8_cache_stays_near_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is max / 127, so a rounded number errs by max / 127 / sqrt(12), about 0.6 % of the root mean square of a
    row of 8 (whose largest number is at most 2.8 times that); a model of two layers is allowed five times as much. With
    steps of max / 15 the same model is far outside."""
    model = small(PATTERNS[name])
    ids = torch.randint(model.spec.vocab, (2, 40))
    for chunk in (1, 7, 40):
        assert 1e-4 < error(model, ids, chunk) < 0.03
    monkeypatch.setattr("headway.quantization.LARGEST", 15)
    assert error(model, ids) > 0.03


def stretched() -> Decoder:
    """Returns a model whose angles depend on the length: its keys are rotated when they are read."""
    model = small((Window.last(5), Causal()))
    positions = Rotary(100.0, pairing="halves", scaling=DynamicNTK(4.0, 16))
    other = build(replace(model.spec, positions=positions), seed=3).eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("make_model", [*(lambda p=p: small(p) for p in PATTERNS.values()), stretched])
def test_a_model_reads_the_numbers_that_are_stored(
    make_model: Callable[[], Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is a float cache of the rounded numbers, in float64, where another order of sums moves no code to the
    next."""
    model = make_model().double()
    ids = torch.randint(model.spec.vocab, (2, 40))
    actual, update = logits(model, ids, 3, INT8), PagedLayer.update

    def rounding(self: PagedLayer, k: Tensor, v: Tensor, tokens: Tokens) -> KeyValues:
        plain = KeyValues(k, v, tokens).quantized().dequantized(k.dtype)
        return update(self, plain.k, plain.v, tokens)

    monkeypatch.setattr(PagedLayer, "update", rounding)
    torch.testing.assert_close(actual, logits(model, ids, 3, None), rtol=0, atol=1e-9 * actual.std().item())
