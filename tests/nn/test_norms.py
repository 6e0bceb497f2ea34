"""RMSNorm (row 29) and LayerNorm."""

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from headway.nn import LayerNorm, RMSNorm, make_norm
from headway.nn.fused import Norm, plain_rms_norm
from headway.nn.norms import normed_sum

WIDTH = 48


def pair(dtype: torch.dtype, eps: float) -> tuple[RMSNorm, LlamaRMSNorm]:
    ours, theirs = RMSNorm(WIDTH, eps), LlamaRMSNorm(WIDTH, eps)
    gain = torch.randn(WIDTH)
    with torch.no_grad():
        ours.weight.copy_(gain)
        theirs.weight.copy_(gain)
    return ours.to(dtype), theirs.to(dtype)


@pytest.mark.parametrize("eps", [1e-6, 1e-5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_formula_is_bit_equal_to_transformers_and_the_kernels_within_rounding(
    dtype: torch.dtype, eps: float
) -> None:
    ours, theirs = pair(dtype, eps)
    for size in (1e-4, 1.0, 300.0):
        x = (torch.randn(3, 7, WIDTH) * size).to(dtype)
        assert torch.equal(plain_rms_norm(x, ours.weight, eps), theirs(x))
        assert ours(x).dtype == dtype
        # the sum of squares in another order, and its root: two roundings; bf16 rounds the difference once more
        torch.testing.assert_close(ours(x), theirs(x), rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_casting_after_the_gain_is_another_function() -> None:
    """The test above can fail: a cast after the gain gives other bits in bf16."""
    ours, _ = pair(torch.bfloat16, 1e-6)
    x = torch.randn(64, WIDTH).bfloat16()
    in_float32 = x.float()
    cast_last = (
        in_float32 * torch.rsqrt(in_float32.pow(2).mean(-1, keepdim=True) + 1e-6) * ours.weight.float()
    ).bfloat16()
    assert not torch.equal(ours(x), cast_last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_an_offset_is_that_of_gemma(dtype: torch.dtype) -> None:
    """1 + w in float32, rounded once afterwards: bf16 numbers near 1 keep few bits of a small w."""
    ours, theirs = RMSNorm(WIDTH, 1e-6, offset=1.0).to(dtype), Gemma2RMSNorm(WIDTH, 1e-6).to(dtype)
    assert torch.equal(ours.weight, theirs.weight)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.normal_(0, 0.01))
    x = (torch.randn(3, 7, WIDTH) * 3).to(dtype)
    y = torch.randn(x.shape).to(dtype)
    eps = max(
        torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    )  # theirs computes in float32 even for float64
    for actual, expected in ((ours(x), theirs(x)), (normed_sum(ours, x, y)[0], theirs(x + y))):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected, rtol=4 * eps, atol=0)
        if dtype == torch.bfloat16:  # rounded once, at the same place
            assert (actual != expected).float().mean() < 0.05


def test_the_formula_in_float64() -> None:
    norm = RMSNorm(WIDTH, 1e-6, bias=True).double()
    torch.nn.init.normal_(norm.weight)
    assert norm.bias is not None
    torch.nn.init.normal_(norm.bias)
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight + norm.bias
    assert torch.allclose(norm(x), expected, rtol=0, atol=1e-14)


@torch.no_grad()
def test_invariant_to_rescaling_but_not_to_recentring() -> None:
    norm = RMSNorm(WIDTH, 1e-6).double()
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    assert torch.allclose(norm(x), norm(1000 * x), rtol=0, atol=1e-5)
    assert float((norm(x) - norm(x + 1)).abs().max()) > 0.1
    layer = LayerNorm(WIDTH, weight=False).double()
    assert torch.allclose(layer(x), layer(x + 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_offset_of_a_layer_norm_is_that_of_nemotron(dtype: torch.dtype) -> None:
    ours = LayerNorm(WIDTH, 1e-5, offset=1.0).to(dtype)
    theirs = NemotronLayerNorm1P(WIDTH, 1e-5).to(dtype)
    assert not ours.weight.any()
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.normal_(0, 0.1))
        theirs.bias.copy_(ours.bias.normal_())
    x = (torch.randn(3, 7, WIDTH) * 3).to(dtype)
    assert torch.equal(ours(x), theirs(x))
    torch.testing.assert_close(normed_sum(ours, x, x)[0], theirs(x + x))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_without_weights_is_one_with_ones(kind: Norm) -> None:
    bare, with_ones = make_norm(kind, WIDTH, 1e-5, False, weight=False), make_norm(kind, WIDTH, 1e-5, False)
    assert [*bare.parameters()] == []
    x = torch.randn(3, 7, WIDTH, requires_grad=True)
    y = torch.randn(3, 7, WIDTH)
    for actual, expected in (
        (bare(x), with_ones(x)),
        (normed_sum(bare, x, y)[0], normed_sum(with_ones, x, y)[0]),
    ):
        torch.testing.assert_close(actual, expected)
        grads = [torch.autograd.grad(out, x, y)[0] for out in (actual, expected)]
        torch.testing.assert_close(*grads)


def test_bias_is_trained_only_when_asked_for() -> None:
    assert [n for n, _ in RMSNorm(WIDTH).named_parameters()] == ["weight"]
    assert [n for n, _ in RMSNorm(WIDTH, bias=True).named_parameters()] == ["weight", "bias"]


def test_gradients_are_those_of_the_formula() -> None:
    norm = RMSNorm(4, 1e-6).double()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        y: Tensor = norm(x)
        return y

    assert torch.autograd.gradcheck(run, x)
