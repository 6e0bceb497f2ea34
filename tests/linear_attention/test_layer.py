"""The layer of linear attention and its cache of constant size (requirements 78, 80, 81)."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.attention.linear_attention import LinearAttentionSpec, linear_attend
from headway.cache import BatchCache, CacheSpec, PagedCache
from headway.errors import CacheError, ConfigError
from headway.nn import Attention, LinearAttention, RotaryEmbedding
from headway.patterns import Causal, Full, Pattern
from headway.positions import DynamicNTK, NoPositions, Rotary
from headway.tokens import Tokens
from tests.cache.layers import cache_of, continued

WIDTH, HEADS, KV_HEADS, D, N = 24, 6, 2, 6, 12
ROTARY = Rotary(100.0, pairing="halves")
X = torch.randn(3, N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LINEARS = [LinearAttentionSpec(), LinearAttentionSpec("relu", "exp"), LinearAttentionSpec("cosine")]


def layer_of(linear: LinearAttentionSpec = LINEARS[0], **options: object) -> LinearAttention:
    torch.manual_seed(1)
    fields = {"head_dim": D, "positions": ROTARY, **options}
    return LinearAttention(WIDTH, HEADS, KV_HEADS, linear=linear, **fields).double()  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", [Causal(), Full()], ids=str)
@pytest.mark.parametrize("linear", LINEARS, ids=str)
@pytest.mark.parametrize(
    "more", [{}, {"value_dim": 5}, {"qk_norm": "head", "qkv_bias": True, "out_bias": True}], ids=str
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
    q, k, v = softmax.projected(X)
    rotation = ROTARY.rotation(torch.arange(N), D, dtype=torch.float64)
    out = linear_attend(q, k, v, linear, pattern, rotation=rotation, form="parallel")
    expected = softmax.o_proj(out.transpose(1, 2).flatten(2))
    assert torch.allclose(layer(X), expected, rtol=0, atol=1e-12)
    table = RotaryEmbedding(ROTARY, D)(Tokens.range(N), torch.float64)
    assert torch.allclose(layer(X, rotation=table), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(softmax(X), expected, atol=1e-3)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from(LINEARS))
def test_row_80_row_81_any_split_through_the_cache_is_one_forward(
    sizes: list[int], linear: LinearAttentionSpec
) -> None:
    layer, count = layer_of(linear), sum(sizes)
    x = torch.randn(2, count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        cache = cache_of(layer, 2)
        parts = [continued(layer, part, cache) for part in x.split(sizes, 1)]
        assert cache.lengths == (count, count)
        assert torch.allclose(torch.cat(parts, 1), layer(x), rtol=0, atol=1e-11)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_chunks_give_what_each_row_gives_alone(side: str) -> None:
    layer = layer_of()
    cache = cache_of(layer, 3)
    steps = [(5, [5, 2, 0]), (1, [1, 1, 1]), (4, [1, 4, 3])]
    seen: list[list[torch.Tensor]] = [[], [], []]
    actual: list[list[torch.Tensor]] = [[], [], []]
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for total, lengths in steps:
            x = torch.randn(3, total, WIDTH, dtype=torch.float64, generator=noise)
            tokens = cache.next_tokens(total, lengths, side)
            valid = tokens.valid.expand(3, -1)
            y = continued(layer, x.masked_fill(~valid[..., None], float("nan")), cache, tokens)
            for b in range(3):
                seen[b].append(x[b][valid[b]])
                actual[b].append(y[b][valid[b]])
        assert cache.lengths == (7, 7, 4)
        for b in range(3):
            alone = layer(torch.cat(seen[b])[None])[0]
            assert torch.allclose(torch.cat(actual[b]), alone, rtol=0, atol=1e-12)


def test_a_packed_row_equals_its_documents_alone() -> None:
    layer = layer_of()
    packed = layer(X[:1], tokens=Tokens.packed([[5, 4]], N))
    for a, b in ((0, 5), (5, 9)):
        assert torch.allclose(packed[:, a:b], layer(X[:1, a:b]), rtol=0, atol=1e-12)


def test_rows_are_chosen_copied_and_continued() -> None:
    layer = layer_of()
    with torch.no_grad():
        cache = cache_of(layer, 3)
        continued(layer, X[:, :7], cache)
        copy = cache.fork()
        cache.reorder([2, 0, 0, 1])
        rows = X[[2, 0, 0, 1]]
        assert torch.allclose(continued(layer, rows[:, 7:], cache), layer(rows)[:, 7:], rtol=0, atol=1e-12)
        assert copy.lengths == (7, 7, 7)
        assert torch.allclose(continued(layer, X[:, 7:], copy), layer(X)[:, 7:], rtol=0, atol=1e-12)


def test_the_cache_is_of_constant_size() -> None:
    layer = layer_of(LinearAttentionSpec("cosine"), head_dim=64).bfloat16()
    spec = CacheSpec(kv_heads=KV_HEADS, head_dim=64, dtype=torch.bfloat16)
    cache, grown = cache_of(layer, 2), BatchCache(PagedCache(spec, [Causal()]), 2)
    size = 2 * (KV_HEADS * 65 * (64 + 1) * 4 + 8)
    x = torch.randn(2, 600, WIDTH, dtype=torch.bfloat16)
    with torch.no_grad():
        for n in (500, 100):
            continued(layer, x[:, :n], cache)
            assert cache.nbytes == size
            with grown.step(grown.next_tokens(n)) as packed:
                grown.pages[0].update(*torch.randn(2, 1, KV_HEADS, 2 * n, 64), packed.tokens)  # type: ignore[call-arg, arg-type]
    assert cache.lengths == (600, 600)
    assert grown.nbytes > 2 * cache.nbytes
    assert cache.pages[0].tensors[0].dtype == torch.float32


def test_a_state_forgets_nothing() -> None:
    layer = layer_of()
    cache = cache_of(layer, 3)
    with torch.no_grad():
        continued(layer, X, cache)
    cache.trim(0)
    with pytest.raises(CacheError, match="a recurrent state cannot be trimmed; fork the text before"):
        cache.trim(1)
    with pytest.raises(CacheError, match="cannot trim 13 tokens of a text of 12"):
        cache.trim(13)
    assert cache.lengths == (N, N, N)


def test_what_cannot_be_summed_is_refused() -> None:
    layer = layer_of()
    with pytest.raises(CacheError, match="states require a gradient, and a cache holds none"):
        continued(layer, X, cache_of(layer, 3))
    for fields, message in (
        ({"dtype": torch.int8}, "all layers keep states, in float32"),
        ({"kv_heads": 0}, "must be positive"),
    ):
        shape: dict[str, Any] = {"kv_heads": 1, "head_dim": 4, **fields}
        with pytest.raises(CacheError, match=message):
            PagedCache(CacheSpec(**shape), [Causal()], [layer.state(torch.float32)])


def test_caches_that_do_not_fit_the_layer() -> None:
    spec = CacheSpec(kv_heads=KV_HEADS, head_dim=D, dtype=torch.float64)
    keys = BatchCache(PagedCache(spec, [Causal()]), 3)
    cases = [
        (layer_of(), keys, "must keep the sums of elu.*got a PagedLayer of keys"),
        (layer_of(LINEARS[2]), cache_of(layer_of(), 3), "must keep the sums of cosine.* of elu"),
        (layer_of(pattern=Full()), cache_of(layer_of(), 3), "queries see later tokens"),
        (
            layer_of(positions=Rotary(pairing="halves", scaling=DynamicNTK(2.0, 8))),
            cache_of(layer_of(), 3),
            "rotation of earlier keys changes as a row grows, but a cache keeps only their sum",
        ),
    ]
    for layer, cache, message in cases:
        with pytest.raises(ConfigError, match=message), torch.no_grad():
            continued(layer, X, cache)


def test_cross_attention_reads_the_sums_of_memory() -> None:
    layer = layer_of(pattern=Full(), positions=NoPositions())
    memory = X[:, :7].flip(1)
    at = Tokens.from_lengths([7, 4, 0])
    actual = layer(X, memory=memory, memory_tokens=at)
    (q,), keys = layer.projected(X, "q"), layer.keys(memory)
    k, v = keys.k, keys.v
    for b, n in enumerate((7, 4, 0)):
        out = linear_attend(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], layer.mixer.linear)
        expected = layer.o_proj(out.transpose(1, 2).flatten(2))
        assert torch.allclose(actual[b : b + 1], expected, rtol=0, atol=1e-12)
    causal, turned = layer_of(positions=NoPositions()), layer_of(pattern=Full())
    for other, options, message in (
        (causal, {}, "needs pattern=Full"),
        (turned, {}, "no rotary positions"),
        (layer, {"cache": cache_of(layer_of(), 3).pages[0]}, "takes no cache"),
        (layer, {"rotation": ROTARY.rotation(torch.arange(N), D)}, "memory is given, so nothing is rotated"),
    ):
        with pytest.raises(ConfigError, match=message):
            other(X, memory=memory, **options)
    with pytest.raises(ConfigError, match="memory_tokens needs memory="):
        layer(X, memory_tokens=at)
    with pytest.raises(ConfigError, match=r"memory has 2 rows, x has 3"):
        layer(X, memory=memory[:2])
    with pytest.raises(ConfigError, match=r"x must be \[batch, tokens, 24\]"):
        layer(X[0])


def test_values_turn_where_the_scheme_says_so() -> None:
    positions = Rotary(100.0, pairing="halves", values=True)
    layer, plain = layer_of(positions=positions), layer_of()
    plain.load_state_dict(layer.state_dict())
    q, k, v = layer.projected(X)
    rotation = ROTARY.rotation(torch.arange(N), D, dtype=torch.float64)
    out = linear_attend(q, k, rotation.apply(v), layer.mixer.linear, Causal(), rotation=rotation)
    expected = layer.o_proj(out.transpose(1, 2).flatten(2))
    assert torch.allclose(layer(X), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(plain(X), expected, atol=1e-3)


def test_bfloat16_in_and_out() -> None:
    layer = layer_of().to(torch.bfloat16)
    exact = layer_of()
    exact.load_state_dict(layer.state_dict())
    actual = layer(X.bfloat16())
    assert actual.dtype == torch.bfloat16
    expected = exact(X.bfloat16().double())
    assert (actual.double() - expected).norm() < 0.02 * expected.norm()
    actual.float().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())


@pytest.mark.parametrize("count", [1, 40, 200])
def test_autocast_reaches_the_projections_and_not_the_sums(count: int) -> None:
    layer = layer_of().float()
    x = torch.randn(1, count, WIDTH, generator=torch.Generator().manual_seed(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = layer(x)
        q, k, v = layer.projected(x)
    assert q.dtype == actual.dtype == torch.bfloat16
    rotation = ROTARY.rotation(torch.arange(count), D, dtype=torch.float64)
    exact = linear_attend(q.double(), k.double(), v.double(), layer.mixer.linear, Causal(), rotation=rotation)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inner = linear_attend(
            q, k, v, layer.mixer.linear, Causal(), rotation=ROTARY.rotation(torch.arange(count), D)
        )
    assert (inner.double() - exact).abs().max() <= 2**-8 * exact.abs().max(), "one rounding"
    actual.float().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())


def test_shapes_are_known_without_numbers() -> None:
    layer = LinearAttention(WIDTH, HEADS, KV_HEADS, head_dim=D, positions=ROTARY).to("meta")
    x = torch.empty(2, 100, WIDTH, device="meta")
    assert layer(x, tokens=Tokens.range(100, device="meta")).shape == x.shape
