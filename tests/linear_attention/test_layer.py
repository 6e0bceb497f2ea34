"""The layer and its cache of constant size (rows 78, 80, 81)."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.attention.linear_attention import LinearAttentionSpec, linear_attend, linear_state
from headway.cache import CacheSpec, DecoderCache, LinearAttentionCache, make_cache
from headway.errors import CacheError, ConfigError, HeadwayError
from headway.nn import Attention, LinearAttention, RotaryEmbedding
from headway.patterns import Causal, Full, Pattern
from headway.positions import DynamicNTK, NoPositions, Rotary
from headway.tokens import Tokens

WIDTH, HEADS, KV_HEADS, D, N = 24, 6, 2, 6, 12
ROTARY = Rotary(100.0, pairing="halves")
X = torch.randn(3, N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LINEARS = [LinearAttentionSpec(), LinearAttentionSpec("relu", "exp"), LinearAttentionSpec("cosine")]


def layer_of(linear: LinearAttentionSpec = LINEARS[0], **given_: object) -> LinearAttention:
    torch.manual_seed(1)
    fields = {"head_dim": D, "positions": ROTARY, **given_}
    return LinearAttention(WIDTH, HEADS, KV_HEADS, linear=linear, **fields).double()  # type: ignore[arg-type]


def cache_of(layer: LinearAttention, batch: int = 3) -> LinearAttentionCache:
    return LinearAttentionCache(
        layer.mixer.linear,
        CacheSpec(
            batch=batch,
            kv_heads=KV_HEADS,
            head_dim=layer.head_dim,
            value_dim=layer.value_dim,
            dtype=torch.float64,
        ),
    )


@pytest.mark.parametrize("pattern", [Causal(), Full()], ids=str)
@pytest.mark.parametrize("linear", LINEARS, ids=str)
@pytest.mark.parametrize(
    "more", [{}, {"value_dim": 5}, {"qk_norm": True, "qkv_bias": True, "out_bias": True}], ids=str
)
def test_a_state_dict_of_attention_fits_and_gives_linear_attention_of_its_projections(
    more: dict[str, object], linear: LinearAttentionSpec, pattern: Pattern
) -> None:
    softmax = Attention(
        WIDTH,
        HEADS,
        KV_HEADS,
        head_dim=D,
        positions=ROTARY,
        pattern=pattern,
        **more,  # type: ignore[arg-type]
    ).double()
    layer = layer_of(linear, pattern=pattern, **more)
    assert list(layer.state_dict()) == list(softmax.state_dict())
    layer.load_state_dict(softmax.state_dict())
    q, k, v = softmax.queries(X), *softmax.keys_values(X)
    rotation = ROTARY.rotation(torch.arange(N), D, dtype=torch.float64)
    out = linear_attend(q, k, v, linear, pattern, rotation=rotation, form="parallel")
    want = softmax.o_proj(out.transpose(1, 2).flatten(2))
    assert torch.allclose(layer(X), want, rtol=0, atol=1e-12)
    table = RotaryEmbedding(ROTARY, D)(Tokens.range(N), torch.float64)
    assert torch.allclose(layer(X, rotation=table), want, rtol=0, atol=1e-12)
    assert not torch.allclose(softmax(X), want, atol=1e-3)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from(LINEARS))
def test_row_80_row_81_any_split_through_the_cache_is_one_forward(
    sizes: list[int], linear: LinearAttentionSpec
) -> None:
    layer, count = layer_of(linear), sum(sizes)
    x = torch.randn(2, count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        cache = cache_of(layer, 2)
        parts = [layer(part, cache=cache) for part in x.split(sizes, 1)]
        assert cache.lengths == (count, count)
        assert torch.allclose(torch.cat(parts, 1), layer(x), rtol=0, atol=1e-11)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_chunks_give_what_each_row_gives_alone(side: str) -> None:
    layer = layer_of()
    cache = DecoderCache([cache_of(layer)])
    steps = [(5, [5, 2, 0]), (1, [1, 1, 1]), (4, [1, 4, 3])]
    seen: list[list[torch.Tensor]] = [[], [], []]
    got: list[list[torch.Tensor]] = [[], [], []]
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for total, lengths in steps:
            x = torch.randn(3, total, WIDTH, dtype=torch.float64, generator=noise)
            tokens = cache.next_tokens(total, lengths, side)
            valid = tokens.valid.expand(3, -1)
            y = layer(x.masked_fill(~valid[..., None], float("nan")), tokens=tokens, cache=cache[0])
            for b in range(3):
                seen[b].append(x[b][valid[b]])
                got[b].append(y[b][valid[b]])
        assert cache.lengths == (7, 7, 4)
        for b in range(3):
            alone = layer(torch.cat(seen[b])[None])[0]
            assert torch.allclose(torch.cat(got[b]), alone, rtol=0, atol=1e-12)


def test_a_packed_row_equals_its_documents_alone() -> None:
    layer = layer_of()
    got = layer(X[:1], tokens=Tokens.packed([[5, 4]], N))
    for a, b in ((0, 5), (5, 9)):
        assert torch.allclose(got[:, a:b], layer(X[:1, a:b]), rtol=0, atol=1e-12)


def test_rows_are_chosen_copied_and_continued() -> None:
    layer = layer_of()
    with torch.no_grad():
        cache = DecoderCache([cache_of(layer), cache_of(layer)])
        for past in cache.layers:
            layer(X[:, :7], cache=past)
        copy = cache.fork()
        cache.reorder([2, 0, 0, 1])
        rows = X[[2, 0, 0, 1]]
        assert torch.allclose(layer(rows[:, 7:], cache=cache[1]), layer(rows)[:, 7:], rtol=0, atol=1e-12)
        assert copy.lengths == (7, 7, 7)
        assert torch.allclose(layer(X[:, 7:], cache=copy[1]), layer(X)[:, 7:], rtol=0, atol=1e-12)
        assert torch.equal(cache_of(layer).state.kv, torch.zeros(3, KV_HEADS, D, D, dtype=torch.float64))
    with pytest.raises(CacheError, match=r"rows must be a list of numbers in 0\.\.3"):
        cache.reorder([4])


def test_the_cache_is_of_constant_size() -> None:
    cache = LinearAttentionCache(
        LinearAttentionSpec("cosine"), CacheSpec(batch=2, kv_heads=4, head_dim=64, dtype=torch.bfloat16)
    )
    size = 2 * (4 * 65 * (64 + 1) * 4 + 8)
    assert (cache.nbytes, cache.bound, cache.slots, cache.dtype) == (size, 1, 0, torch.float32)
    cache.reserve(1 << 40)
    k, v = torch.randn(2, 2, 4, 500, 64, dtype=torch.bfloat16)
    cache.update(linear_state(k, v, LinearAttentionSpec("cosine")), Tokens.range(500))
    assert (cache.nbytes, cache.slots, cache.lengths) == (size, 1, (500, 500))
    assert cache.length.tolist() == [500, 500]
    grown = make_cache(Causal(), CacheSpec(batch=2, kv_heads=4, head_dim=64, dtype=torch.bfloat16))
    grown.update(k, v, Tokens.range(500))
    assert grown.nbytes > 2 * cache.nbytes
    assert "features=65" in repr(cache)


def test_a_state_forgets_nothing() -> None:
    layer = layer_of()
    cache = DecoderCache([cache_of(layer)])
    with torch.no_grad():
        layer(X, cache=cache[0])
    cache.trim(0)
    with pytest.raises(CacheError, match=r"no key can be taken out of a sum again; fork\(\) before"):
        cache.trim(1)
    with pytest.raises(CacheError, match="has seen 12 tokens and cannot forget 13"):
        cache.trim(13)
    assert cache.lengths == (N, N, N)


def test_what_the_cache_refuses_leaves_it_as_it_was() -> None:
    layer = layer_of()
    cache = cache_of(layer)
    k, v = torch.randn(2, 3, KV_HEADS, N, D, dtype=torch.float64)
    state = linear_state(k, v)
    calls = [
        (state, Tokens.range(N, start=1), "the next index is 0, but the chunk's first is 1"),
        (state, Tokens.packed([[5, 7]] * 3), "one document per row"),
        (state, Tokens.range(N).expand(2), "tokens of 2 rows for a cache of 3"),
        (linear_state(k.float(), v.float()), Tokens.range(N), "do not add"),
        (linear_state(k[:1], v[:1]), Tokens.range(N), "do not add"),
        (linear_state(k.requires_grad_(), v), Tokens.range(N), "requires a gradient, and a cache holds none"),
    ]
    for new, tokens, says in calls:
        with pytest.raises(CacheError, match=says):
            cache.update(new, tokens)
        assert cache.lengths == (0, 0, 0)
        assert not cache.state.kv.any()
    for given_, says in (
        ({"dtype": torch.int8}, "sums over all keys"),
        ({"kv_heads": 0}, "must be positive"),
    ):
        shape: dict[str, Any] = {"batch": 1, "kv_heads": 1, "head_dim": 4, **given_}
        with pytest.raises(CacheError, match=says):
            LinearAttentionCache(LinearAttentionSpec(), CacheSpec(**shape))
    with pytest.raises(HeadwayError, match="later ones too"):
        LinearAttentionCache(
            LinearAttentionSpec("softmax", "softmax over tokens"), CacheSpec(batch=1, kv_heads=1, head_dim=4)
        )


def test_caches_that_do_not_fit_the_layer() -> None:
    keys = make_cache(Causal(), CacheSpec(batch=3, kv_heads=KV_HEADS, head_dim=D, dtype=torch.float64))
    cases = [
        (layer_of(), keys, "must be a LinearAttentionCache of elu.*got a KVCache of keys"),
        (layer_of(LINEARS[2]), cache_of(layer_of()), "must be a LinearAttentionCache of cosine.* of elu"),
        (layer_of(pattern=Full()), cache_of(layer_of()), "queries see later tokens"),
        (
            layer_of(positions=Rotary(pairing="halves", scaling=DynamicNTK(2.0, 8))),
            cache_of(layer_of()),
            "earlier keys are rotated anew as a row grows, but they have been summed",
        ),
    ]
    for layer, cache, says in cases:
        with pytest.raises(ConfigError, match=says), torch.no_grad():
            layer(X, cache=cache)


def test_cross_attention_reads_the_sums_of_memory() -> None:
    layer = layer_of(pattern=Full(), positions=NoPositions())
    memory = X[:, :7].flip(1)
    at = Tokens.from_lengths([7, 4, 0])
    got = layer(X, memory=memory, memory_tokens=at)
    q, keys = layer.queries(X), layer.keys(memory)
    k, v = keys.k, keys.v
    for b, n in enumerate((7, 4, 0)):
        out = linear_attend(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], layer.mixer.linear)
        want = layer.o_proj(out.transpose(1, 2).flatten(2))
        assert torch.allclose(got[b : b + 1], want, rtol=0, atol=1e-12)
    causal, turned = layer_of(positions=NoPositions()), layer_of(pattern=Full())
    for other, given_, says in (
        (causal, {}, "needs pattern=Full"),
        (turned, {}, "no rotary positions"),
        (layer, {"cache": cache_of(layer)}, "takes no cache"),
        (layer, {"rotation": ROTARY.rotation(torch.arange(N), D)}, "memory is given, and nothing is rotated"),
    ):
        with pytest.raises(ConfigError, match=says):
            other(X, memory=memory, **given_)
    with pytest.raises(ConfigError, match="memory_tokens describe"):
        layer(X, memory_tokens=at)
    with pytest.raises(ConfigError, match=r"memory has 2 rows, x has 3"):
        layer(X, memory=memory[:2])
    with pytest.raises(ConfigError, match=r"x must be \[batch, tokens, 24\]"):
        layer(X[0])


def test_values_turn_where_the_scheme_says_so() -> None:
    positions = Rotary(100.0, pairing="halves", values=True)
    layer, plain = layer_of(positions=positions), layer_of()
    plain.load_state_dict(layer.state_dict())
    q, k, v = layer.queries(X), *layer.keys_values(X)
    rotation = ROTARY.rotation(torch.arange(N), D, dtype=torch.float64)
    out = linear_attend(q, k, rotation.apply(v), layer.mixer.linear, Causal(), rotation=rotation)
    want = layer.o_proj(out.transpose(1, 2).flatten(2))
    assert torch.allclose(layer(X), want, rtol=0, atol=1e-12)
    assert not torch.allclose(plain(X), want, atol=1e-3)


def test_bfloat16_in_and_out() -> None:
    layer = layer_of().to(torch.bfloat16)
    exact = layer_of()
    exact.load_state_dict(layer.state_dict())
    got = layer(X.bfloat16())
    assert got.dtype == torch.bfloat16
    want = exact(X.bfloat16().double())
    assert (got.double() - want).norm() < 0.02 * want.norm()
    got.float().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())


@pytest.mark.parametrize("count", [1, 40, 200])
def test_autocast_reaches_the_projections_and_not_the_sums(count: int) -> None:
    layer = layer_of().float()
    x = torch.randn(1, count, WIDTH, generator=torch.Generator().manual_seed(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer(x)
        q, k, v = layer.queries(x), *layer.keys_values(x)
    assert q.dtype == got.dtype == torch.bfloat16
    rotation = ROTARY.rotation(torch.arange(count), D, dtype=torch.float64)
    exact = linear_attend(q.double(), k.double(), v.double(), layer.mixer.linear, Causal(), rotation=rotation)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inner = linear_attend(
            q, k, v, layer.mixer.linear, Causal(), rotation=ROTARY.rotation(torch.arange(count), D)
        )
    assert (inner.double() - exact).abs().max() <= 2**-8 * exact.abs().max(), "one rounding"
    got.float().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())


def test_shapes_are_known_without_numbers() -> None:
    layer = LinearAttention(WIDTH, HEADS, KV_HEADS, head_dim=D, positions=ROTARY).to("meta")
    x = torch.empty(2, 100, WIDTH, device="meta")
    assert layer(x, tokens=Tokens.range(100, device="meta")).shape == x.shape
