"""Feed-forward layers (rows 20, 32)."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import XIELUActivation

from headway.native.loader import library
from headway.nn import FeedForward
from headway.nn.feedforward import CHUNK, XIELU, swish
from headway.nn.fused import gated, plain_gated
from tests.saved import saved_tensors

GatedFeedForward = partial(FeedForward, gated=True)


def test_the_formulas() -> None:
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    plain = FeedForward(8, 20, "relu", bias=True).double()
    up, down = plain.up_proj, plain.down_proj
    expected = F.relu(x @ up.weight.T + up.bias) @ down.weight.T + down.bias
    assert torch.allclose(plain(x), expected, rtol=0, atol=1e-13)
    gated = GatedFeedForward(8, 20, "silu").double()
    gate = x @ gated.gate_proj.weight.T
    expected = (gate * torch.sigmoid(gate) * (x @ gated.up_proj.weight.T)) @ gated.down_proj.weight.T
    assert torch.allclose(gated(x), expected, rtol=0, atol=1e-13)


def test_an_activation_with_trained_numbers_is_theirs() -> None:
    ours, theirs = XIELU(), XIELUActivation(dtype=torch.float32)
    for name, value in ours.named_parameters():
        torch.testing.assert_close(value, theirs.get_parameter(name))
    with torch.no_grad():
        for name, value in ours.named_parameters():
            theirs.get_parameter(name).copy_(value.normal_())
    x = torch.randn(4, 9) * 3
    ys = [act(x) for act in (ours, theirs)]
    torch.testing.assert_close(*ys)
    grads = [
        torch.autograd.grad(y.sum(), (act.alpha_p, act.alpha_n))
        for y, act in zip(ys, (ours, theirs), strict=True)
    ]
    torch.testing.assert_close(*grads)
    layer = FeedForward(8, 20, "xielu")
    x = torch.randn(2, 8)
    torch.testing.assert_close(layer(x), layer.down_proj(XIELU()(layer.up_proj(x))))


def test_biases_only_when_asked_for() -> None:
    for kind, matrices in ((FeedForward, 2), (GatedFeedForward, 3)):
        assert sum(p.numel() for p in kind(8, 20).parameters()) == matrices * 8 * 20
        assert sum(p.dim() == 1 for p in kind(8, 20, bias=True).parameters()) == matrices


def test_a_token_does_not_see_another() -> None:
    x = torch.randn(1, 6, 8)
    changed = x.clone()
    changed[0, 3] += 1
    for layer in (FeedForward(8, 20), GatedFeedForward(8, 20)):
        unchanged = (layer(x) == layer(changed)).all(-1)[0]
        assert unchanged.tolist() == [True, True, True, False, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [FeedForward, GatedFeedForward])
def test_chunks_of_hidden_layers_that_nobody_keeps(
    kind: Callable[..., FeedForward], dtype: torch.dtype
) -> None:
    """Equal to the whole hidden layer at once, which a backward pass needs."""
    torch.manual_seed(0)
    layer = kind(24, 40, bias=True).to(dtype)
    x = torch.randn(3, CHUNK - 100, 24).to(dtype)
    row_counts: list[int] = []
    layer.down_proj.register_forward_pre_hook(lambda _, args: row_counts.append(args[0][..., 0].numel()))
    layer.eval()
    full = layer(x)
    with torch.no_grad():
        chunked = layer(x)
    assert row_counts == [
        x[..., 0].numel(),
        *([CHUNK, CHUNK, CHUNK - 300] if library() else [x[..., 0].numel()]),
    ]
    unit = torch.finfo(dtype).eps * full.detach().abs().max()
    assert chunked.shape == full.shape
    assert torch.allclose(chunked, full, rtol=0, atol=float(2 * unit))
    with torch.no_grad():
        assert torch.equal(layer(x[:1]), layer._transform(x[:1]))
        assert layer.train()(x).shape == x.shape
    assert row_counts[-1] == x[..., 0].numel()


def test_swish_between_half_of_x_and_relu() -> None:
    x = torch.tensor([-3.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    assert torch.equal(swish(x, 0.0), x / 2)
    assert torch.allclose(swish(x, 1.0), F.silu(x), rtol=0, atol=1e-15)
    assert abs(float(swish(x, 100.0)[1])) < 1e-40
    assert torch.allclose(swish(x, 1000.0), F.relu(x), rtol=0, atol=1e-12)
    assert math.isclose(float(swish(torch.tensor(2.0), 0.0)), 1.0)


def test_an_unknown_activation_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"no activation 'gelu_tanh' \(did you mean \"gelu_pytorch_tanh\"\?\).*silu"
    ):
        GatedFeedForward(8, 20, "gelu_tanh")


def test_dropout_of_the_hidden_layer_is_on_average_nothing_and_only_in_training() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 1, 8, dtype=torch.float64)
    for kind in (FeedForward, GatedFeedForward):
        plain = kind(8, 20).double().eval()
        dropped = kind(8, 20, dropout=0.5).double()
        dropped.load_state_dict(plain.state_dict())
        assert torch.equal(dropped.eval()(x), plain(x))
        samples = dropped.train()(x.expand(1, 40000, 8))
        assert not torch.equal(samples[:, 0], samples[:, 1])
        error = samples.std(1) / 40000**0.5
        assert ((samples.mean(1) - plain(x)[:, 0]).abs() < 5 * error).all()


def test_the_clamped_swiglu_of_gpt_oss() -> None:
    """Its formula, with the gradient of its own operations; only gate and up are kept for the backward."""
    gate, up = (10 * torch.randn(4, 9, requires_grad=True, dtype=torch.float64) for _ in range(2))
    clamped = gate.clamp(max=7)
    expected = (up.clamp(-7, 7) + 1) * clamped * torch.sigmoid(1.702 * clamped)
    with saved_tensors() as saved:
        actual = gated(gate, up, "clamped_swiglu")
    assert torch.equal(actual, plain_gated(gate, up, "clamped_swiglu"))
    assert torch.allclose(actual, expected, rtol=0, atol=1e-12)
    assert len(saved) == 2
    actual_grads, expected_grads = (
        torch.autograd.grad(y.square().sum(), (gate, up), retain_graph=True) for y in (actual, expected)
    )
    assert all(
        torch.allclose(a, b, rtol=1e-12, atol=1e-12)
        for a, b in zip(actual_grads, expected_grads, strict=True)
    )
    small = [torch.randn(2, 3, requires_grad=True, dtype=torch.float64) for _ in range(2)]
    assert torch.autograd.gradgradcheck(lambda g, u: gated(g, u, "clamped_swiglu"), small)
