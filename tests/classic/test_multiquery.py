"""MultiQueryAttention with the fused projection (requirement 10)."""

import pytest
import torch

from headway.classic import MultiQueryAttention
from tests.classic.oracle import loops


def made(d=12, heads=3, dtype=torch.float64):
    torch.manual_seed(0)
    layer = MultiQueryAttention(d, heads).to(dtype)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return layer


def inputs(s=6, d=12):
    return torch.randn(2, s, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_sizes_of_the_document():
    layer, split = MultiQueryAttention(d_model=768, n_heads=8), []
    layer.Wqkv.register_forward_hook(lambda _m, _a, out: split.append(out.split([768, 96, 96], dim=2)))
    out, weights, past = layer(torch.zeros(1, 512, 768))
    assert layer.Wqkv.out_features == 960
    assert [tuple(t.shape) for t in split[0]] == [(1, 512, 768), (1, 512, 96), (1, 512, 96)]
    assert out.shape == (1, 512, 768)
    assert weights is None
    assert past is None
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {
        "Wqkv.weight": (960, 768),
        "Wqkv.bias": (960,),
        "out_proj.weight": (768, 768),
        "out_proj.bias": (768,),
    }
    assert layer.out_proj._is_residual
    assert MultiQueryAttention(16, 2, device="meta").Wqkv.weight.is_meta


@pytest.mark.parametrize("is_causal", [True, False])
@torch.no_grad()
def test_equals_four_loops_with_a_bias(is_causal):
    layer, x = made(), inputs()
    bias = torch.randn(1, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    out, weights, _ = layer(x, attn_bias=bias, is_causal=is_causal, needs_weights=True)
    allowed = torch.ones(6, 6, dtype=torch.bool)
    allowed = allowed.tril() if is_causal else allowed
    for row in range(2):
        q, k, v = (x[row] @ layer.Wqkv.weight.T + layer.Wqkv.bias).split([12, 4, 4], -1)
        heads = loops(q.unflatten(-1, (3, 4)).transpose(0, 1), k[None], v[None], allowed, bias[0])
        expected = heads.transpose(0, 1).flatten(1) @ layer.out_proj.weight.T + layer.out_proj.bias
        torch.testing.assert_close(out[row], expected, rtol=0, atol=1e-12)
    assert weights.shape == (2, 3, 6, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 6, dtype=torch.float64), rtol=0, atol=1e-14)
    assert (weights.triu(1) == 0).all() == is_causal


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_past_key_value_continues(cut):
    layer, x = made(), inputs()
    whole, _, nothing = layer(x)
    first, _, past = layer(x[:, :cut], past_key_value=())
    second, weights, past = layer(x[:, cut:], past_key_value=past, needs_weights=True)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=0, atol=1e-13)
    assert nothing is None
    assert past[0].shape == past[1].shape == (2, 6, 4)
    assert weights.shape == (2, 3, 6 - cut, 6)


def test_bias_can_hide_everything():
    layer, x = made(), inputs().requires_grad_()
    bias = torch.zeros(1, 1, 6, 6, dtype=torch.float64)
    bias[..., 2, :] = float("-inf")
    out, weights, _ = layer(x, attn_bias=bias, is_causal=False, needs_weights=True)
    out.sum().backward()
    assert (weights[:, :, 2] == 0).all()
    torch.testing.assert_close(out[:, 2], layer.out_proj.bias.expand(2, 12))
    assert torch.isfinite(x.grad).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"d_model = 10 must be a multiple of n_heads = 3"):
        MultiQueryAttention(10, 3)
    with pytest.raises(ValueError, match=r"x must be \(b, s, 12\)"):
        made()(torch.zeros(3, 12, dtype=torch.float64))
    for bias in (torch.ones(6, 6, dtype=torch.bool), torch.zeros(4, 3, 3, 6, 6)):
        with pytest.raises(ValueError, match=r"attn_bias is added to scores \(2, 3, 6, 6\)"):
            made()(inputs(), attn_bias=bias)
