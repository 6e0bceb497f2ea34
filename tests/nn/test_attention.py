"""The attention layer against a reference written with loops, and its switches (rows 3-6, 8, 9, 15, 36, 39, 53)."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.nn import Attention, RMSNorm
from headway.patterns import Full, PerHead, Window, visible
from headway.positions import DynamicNTK, LongRope, Rotary
from headway.scores import RelativeBias, SoftCap
from headway.tokens import Tokens
from tests.cache.layers import cache_of, continued

WIDTH, HEADS, LENGTH = 24, 6, 11
X = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def layer_of(kv_heads: int = 2, **options: object) -> Attention:
    torch.manual_seed(1)
    layer = Attention(WIDTH, HEADS, kv_heads, **{"head_dim": 6, **options}).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return layer


def reference(layer: Attention, x: Tensor, memory: Tensor | None = None) -> Tensor:
    """Computes attention head by head and query by query, from the definition."""
    source = x if memory is None else memory
    group = HEADS // layer.heads.kv_heads
    d, e = layer.head_dim, layer.value_dim
    q_tokens, k_tokens = Tokens.range(x.shape[1]), Tokens.range(source.shape[1])
    visible_pairs = visible(layer.pattern, q_tokens, k_tokens)[0]
    heads = []
    for h in range(HEADS):
        g = h // group
        wq, wk = layer.q_proj.weight[h * d : h * d + d], layer.k_proj.weight[g * d : g * d + d]
        q, k, v = x @ wq.T, source @ wk.T, source @ layer.v_proj.weight[g * e : g * e + e].T
        if layer.q_proj.bias is not None:
            q, k = q + layer.q_proj.bias[h * d : h * d + d], k + layer.k_proj.bias[g * d : g * d + d]
            v = v + layer.v_proj.bias[g * e : g * e + e]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        if isinstance(layer.positions, Rotary):
            rotate = layer.positions.rotate
            q, k = rotate(q[:, None], q_tokens.index)[:, 0], rotate(k[:, None], k_tokens.index)[:, 0]
        rows = []
        for t in range(x.shape[1]):
            allowed = visible_pairs[h if visible_pairs.shape[0] > 1 else 0, t]
            scores = (k @ q[:, t, :, None])[..., 0] * d**-0.5
            scores = scores.masked_fill(~allowed, float("-inf"))
            if layer.sink_logit is not None:
                scores = torch.cat((scores, layer.sink_logit[h].expand(2, 1)), 1)
            weights = scores.softmax(-1)
            assert torch.allclose(weights.sum(-1), torch.ones(2, dtype=torch.float64))
            head_output = (weights[:, : v.shape[1], None] * v).sum(1)
            if layer.g_proj is not None:
                gate = (x[:, t] @ layer.g_proj.weight.T).unflatten(1, (HEADS, -1))[:, h]
                head_output = head_output * (
                    F.softplus(gate) if layer.gate_act == "softplus" else gate.sigmoid()
                )
            rows.append(head_output)
        heads.append(torch.stack(rows, 1))
    out = torch.cat(heads, -1) @ layer.o_proj.weight.T
    return out if layer.o_proj.bias is None else out + layer.o_proj.bias


CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "window": {"pattern": Window.last(4)},
    "full": {"pattern": Full()},
    "heads apart": {"pattern": PerHead(*[Window.last(n + 1) for n in range(HEADS)])},
    "rotary": {"positions": Rotary(100.0, pairing="halves")},
    "rotary adjacent, partial": {"positions": Rotary(100.0, pairing="adjacent", dims=4)},
    "sunk": {"sink_logit": True},
    "gated heads": {"gate": "head"},
    "gated channels": {"gate": "channel", "value_dim": 5, "sink_logit": True},
    "softplus": {"gate": "channel", "gate_act": "softplus"},
    "biased": {"qkv_bias": True, "out_bias": True},
    "normed": {"qk_norm": "head", "positions": Rotary(100.0, pairing="halves")},
    "values of another width": {"value_dim": 5},
}


@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case: str, kv_heads: int) -> None:
    layer = layer_of(kv_heads, **CASES[case])
    assert torch.allclose(layer(X), reference(layer, X), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_cross_attention_equals_the_reference(kv_heads: int) -> None:
    layer = layer_of(kv_heads, pattern=Full())
    memory = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    assert torch.allclose(layer(X, memory=memory), reference(layer, X, memory), rtol=0, atol=1e-12)
    short = layer(X, memory=memory, memory_tokens=Tokens.from_lengths([7, 4]))
    assert torch.allclose(short[1], layer(X[1:], memory=memory[1:, :4])[0], rtol=0, atol=1e-12)


def test_bias_free_by_default_and_four_squares() -> None:
    layer = Attention(WIDTH, HEADS)
    assert sorted(layer.state_dict()) == [f"{n}_proj.weight" for n in "koqv"]
    assert sum(p.numel() for p in layer.parameters()) == 4 * WIDTH**2
    biased = Attention(WIDTH, HEADS, qkv_bias=True, out_bias=True)
    assert sum(name.endswith(".bias") for name in biased.state_dict()) == 4
    normed = Attention(WIDTH, HEADS, qk_norm="head")
    assert isinstance(normed.q_norm, RMSNorm)
    assert normed.state_dict()["k_norm.weight"].shape == (WIDTH // HEADS,)


@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
def test_parameters_shrink_with_kv_heads(kv_heads: int) -> None:
    """Row 51: M D (2 H + 2 K)."""
    layer = Attention(WIDTH, HEADS, kv_heads)
    assert sum(p.numel() for p in layer.parameters()) == WIDTH * 4 * (2 * HEADS + 2 * kv_heads)


@pytest.mark.parametrize("kv_heads", [3, 2, 1])
def test_repeating_kv_heads_gives_the_same_mha(kv_heads: int) -> None:
    """Row 53: the inverse direction of pooling is exact."""
    grouped, full = layer_of(kv_heads), layer_of(HEADS)
    state = grouped.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        state[name] = (
            state[name].unflatten(0, (kv_heads, 6)).repeat_interleave(HEADS // kv_heads, 0).flatten(0, 1)
        )
    full.load_state_dict(state)
    assert torch.allclose(grouped(X), full(X), rtol=0, atol=1e-13)


def test_row_6_dropout_on_weights_and_on_the_output_are_two_things() -> None:
    """Row 6: the first zeroes weights (outputs stay non-zero), the second zeroes outputs, at their rates."""
    x = torch.randn(4, 128, WIDTH)
    on_weights = Attention(WIDTH, HEADS, pattern=Full(), dropout=0.4)
    on_output = Attention(WIDTH, HEADS, pattern=Full(), output_dropout=0.4)
    on_output.load_state_dict(on_weights.state_dict())
    count = 4 * 128 * WIDTH
    zeros = float((on_output(x) == 0).sum()) / count
    assert abs(zeros - 0.4) < 5 * (0.4 * 0.6 / count) ** 0.5
    assert float((on_weights(x) == 0).sum()) == 0
    torch.manual_seed(0)
    first = on_weights(x)
    torch.manual_seed(0)
    assert torch.equal(first, on_weights(x))
    assert not torch.equal(first, on_weights(x))
    on_weights.eval()
    on_output.eval()
    assert torch.equal(on_weights(x), on_weights(x))
    assert torch.equal(on_weights(x), on_output(x))


def test_dropped_weights_are_dropped_at_their_rate() -> None:
    """One-hot values show each weight: zero at rate p, the others scaled by 1 / (1 - p)."""
    n, p = 64, 0.25
    layer = Attention(n, 1, head_dim=n, pattern=Full(), dropout=p)
    with torch.no_grad():
        for proj in (layer.v_proj, layer.o_proj):
            proj.weight.copy_(torch.eye(n))
    x = torch.eye(n)[None]
    dropped = layer(x)
    weights = layer.eval()(x)
    is_zero = dropped == 0
    assert abs(float(is_zero.float().mean()) - p) < 5 * (p * (1 - p) / n**2) ** 0.5
    assert torch.allclose(dropped[~is_zero], weights[~is_zero] / (1 - p), rtol=1e-5, atol=0)


def test_tensors_of_scores_belong_to_the_module() -> None:
    table = torch.nn.Parameter(torch.randn(8, HEADS))
    layer = layer_of(score=[RelativeBias(table, bidirectional=False), SoftCap(20.0)])
    plain = layer_of()
    plain.load_state_dict({n: t for n, t in layer.state_dict().items() if "score" not in n})
    assert "score.0_0" in layer.state_dict()
    y = layer(X)
    assert not torch.allclose(y, plain(X))
    y.pow(2).sum().backward()
    grad = dict(layer.named_parameters())["score.0_0"].grad
    assert grad is not None
    assert float(grad.abs().sum()) > 0
    with torch.device("meta"):
        fresh = Attention(
            WIDTH,
            HEADS,
            2,
            head_dim=6,
            score=[RelativeBias(torch.zeros(8, HEADS), bidirectional=False), SoftCap(20.0)],
        )
    fresh = fresh.double().to_empty(device="cpu")
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(X), y)
    assert "score.0_0" not in dict(fresh.named_parameters())


def in_chunks(layer: Attention, x: Tensor, edges: list[int]) -> Tensor:
    cache = cache_of(layer, len(x))
    with torch.no_grad():
        sizes = [b - a for a, b in pairwise([0, *edges, x.shape[1]])]
        return torch.cat([continued(layer, part, cache) for part in x.split(sizes, 1)], 1)


TRAINED = 6
MOVING = {
    "dynamic": Rotary(100.0, pairing="halves", scaling=DynamicNTK(2.0, TRAINED)),
    "longrope": Rotary(
        100.0, pairing="halves", scaling=LongRope((1.0, 1.1, 1.2), (2.0, 3.0, 4.0), TRAINED, factor=2.0)
    ),
}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"head_dim": 5, "positions": Rotary(pairing="halves")}, "head_dim 5 is odd"),
        ({"width": 25}, "width 25 is not a multiple of 6 heads; give head_dim"),
        ({"head_dim": 0}, "head_dim and value_dim must be at least 1, got 0"),
        ({"dropout": 1.0}, "dropout must be a probability from 0 to below 1, got 1.0"),
        ({"output_dropout": -0.1}, "output_dropout must be a probability from 0 to below 1, got -0.1"),
    ],
)
def test_impossible_layers_are_refused(given: dict[str, object], message: str) -> None:
    fields = {"width": WIDTH, "heads": HEADS, **given}
    with pytest.raises(ValueError, match=message):
        Attention(**fields)  # type: ignore[arg-type]


def test_wrong_calls_are_refused() -> None:
    layer = layer_of(positions=Rotary(pairing="halves"), pattern=Full())
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, 24\], got \[2, 11, 5\]"):
        layer(X[..., :5])
    with pytest.raises(ValueError, match=r"cross-attention needs pattern=Full.*no rotary positions"):
        layer(X, memory=X)
    with pytest.raises(ValueError, match=r"cross-attention needs pattern=Full.*got Causal\(\)"):
        layer_of()(X, memory=X)
    with pytest.raises(ValueError, match="memory_tokens needs memory="):
        layer(X, memory_tokens=Tokens.range(3))
    cross = layer_of(pattern=Full())
    with pytest.raises(ValueError, match=r"memory has 1 rows, x has 2"):
        cross(X, memory=X[:1])
    with pytest.raises(ValueError, match="cross-attention takes no cache"):
        cross(X, memory=X, cache=cache_of(layer_of(), 2).pages[0])
    with pytest.raises(ValueError, match=r"cache= needs tokens=, which its begin\(\) returns"):
        layer_of()(X, cache=cache_of(layer_of(), 2).pages[0])
    table = Rotary(pairing="halves").rotation(torch.arange(LENGTH), 6)
    with pytest.raises(ValueError, match="rotation is given, but positions are NoPositions"):
        layer_of()(X, rotation=table)
    with pytest.raises(ValueError, match="rotation is given, but memory is given"):
        cross(X, memory=X, rotation=table)
    with pytest.raises(ValueError, match="unknown backend 'sdap'"):
        layer_of(backend="sdap")(X)
