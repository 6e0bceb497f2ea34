"""The places of the norms in a block (rows 27, 31)."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.nn import Attention, Block, FeedForward, LayerNorm, RMSNorm
from headway.nn.altup import AlternatingUpdates, AltUp, LaurelProduct
from headway.nn.block import ORDERS


def block_of(order: str) -> Block:
    torch.manual_seed(0)
    attn = Attention(16, 4, 2, dropout=0.0)
    block = Block(attn, FeedForward(16, 24, gated=True), partial(RMSNorm, 16), order)  # type: ignore[arg-type]
    for name, parameter in block.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return block.double()


X = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def order_of_calls(block: Block) -> list[str]:
    calls: list[str] = []
    for name, module in block.named_children():
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    block(X)
    return calls


def test_row_31_pre_norm_norms_before_each_sub_layer() -> None:
    assert order_of_calls(block_of("pre")) == [
        "input_layernorm",
        "self_attn",
        "post_attention_layernorm",
        "mlp",
    ]


def test_post_norm_norms_after_each_residual() -> None:
    assert order_of_calls(block_of("post")) == [
        "self_attn",
        "input_layernorm",
        "mlp",
        "post_attention_layernorm",
    ]


def test_the_two_orders_are_the_documented_formulas_with_the_same_weights() -> None:
    pre, post = block_of("pre"), block_of("post")
    post.load_state_dict(pre.state_dict())

    def parts(b: Block) -> tuple[nn.Module, nn.Module, nn.Module, nn.Module]:
        return b.input_layernorm, b.post_attention_layernorm, b.self_attn, b.mlp

    norm1, norm2, attn, mlp = parts(pre)
    x = X + attn(norm1(X))
    assert torch.equal(pre(X), x + mlp(norm2(x)))
    norm1, norm2, attn, mlp = parts(post)
    x = norm1(X + attn(X))
    assert torch.equal(post(X), norm2(x + mlp(x)))
    assert not torch.allclose(pre(X), post(X))


def test_the_orders_that_norm_outputs_are_the_documented_formulas() -> None:
    sandwich, output = block_of("sandwich"), block_of("output")
    assert order_of_calls(sandwich) == [
        *("input_layernorm", "self_attn", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
    ]
    assert order_of_calls(output) == [
        "self_attn",
        "post_attention_layernorm",
        "mlp",
        "post_feedforward_layernorm",
    ]
    x = X + sandwich.post_attention_layernorm(sandwich.self_attn(sandwich.input_layernorm(X)))
    assert torch.equal(
        sandwich(X),
        x + sandwich.post_feedforward_layernorm(sandwich.mlp(sandwich.pre_feedforward_layernorm(x))),
    )
    x = X + output.post_attention_layernorm(output.self_attn(X))
    assert torch.equal(output(X), x + output.post_feedforward_layernorm(output.mlp(x)))


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_added_is_scaled(order: str) -> None:
    """A scale of 2 equals doubling the last weights of each branch: of its output norm, if any, or its projection."""
    plain, scaled = block_of(order), block_of(order)
    scaled.residual_scale = 2.0
    with torch.no_grad():
        for layer in (
            (plain.post_attention_layernorm, plain.post_feedforward_layernorm)
            if plain.behind[0]
            else (
                plain.self_attn.o_proj,
                plain.mlp.down_proj,
            )
        ):
            layer.weight.mul_(2)
    assert torch.equal(scaled(X), plain(X))


def test_the_first_norm_is_left_out() -> None:
    torch.manual_seed(0)
    arguments = Attention(16, 4), FeedForward(16, 24), partial(RMSNorm, 16)
    block = Block(*arguments, first_norm=False).double()
    x = X + block.self_attn(X)
    assert torch.equal(block(X), x + block.mlp(block.post_attention_layernorm(x)))
    with pytest.raises(ConfigError, match=r"first_norm=False needs order .pre. or .sandwich., got 'output'"):
        Block(*arguments, "output", first_norm=False)


def test_parts_that_an_order_would_not_use_are_refused() -> None:
    sizes, norm = (Attention(16, 4), FeedForward(16, 24)), partial(RMSNorm, 16)
    laurel = LaurelProduct(16, 4, norm)
    with pytest.raises(ConfigError, match='laurel needs order "pre" or "sandwich", got \'parallel\''):
        Block(*sizes, norm, "parallel", laurel=laurel)
    altup = AlternatingUpdates(AltUp(2), 16, norm)
    with pytest.raises(ConfigError, match="altup and layer_scalar exclude each other"):
        Block(*sizes, norm, altup=altup, layer_scalar=True)


def test_the_residual_passes_through_pre_norm_alone() -> None:
    """With sub-layers that give 0, pre-norm is the identity and post-norm is not."""
    for order, is_identity in (("pre", True), ("post", False)):
        block = block_of(order)
        for layer in (block.self_attn.o_proj, block.mlp.down_proj):
            nn.init.zeros_(layer.weight)
        assert torch.equal(block(X), X) == is_identity


def test_other_norms_and_feed_forwards_fit() -> None:
    block = Block(Attention(16, 4), FeedForward(16, 64), partial(LayerNorm, 16), "post")
    y: Tensor = block(X.float())
    assert torch.allclose(y.mean(-1), torch.zeros(2, 5), atol=1e-6)


def test_a_wrong_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no order of norms 'sandwhich'.*sandwich"):
        block_of("sandwhich")


class Still(nn.Module):
    """A feed-forward of zeros, through which no gradient flows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


@pytest.mark.parametrize("feeds", [True, False])
def test_first_and_second_derivatives_are_those_of_float64(feeds: bool) -> None:
    """Also where the kernels add to the stream and norm in one pass; without a feed-forward only the sum is used."""
    torch.manual_seed(0)
    attn = Attention(16, 4, 2, dropout=0.0, backend="dense")
    block = Block(attn, FeedForward(16, 24, gated=True) if feeds else Still(), partial(RMSNorm, 16), "pre")
    derivatives = []
    for dtype in (torch.float32, torch.float64):
        x = X.to(dtype).requires_grad_()
        (slope,) = torch.autograd.grad(block.to(dtype)(x).sin().sum(), x, create_graph=True)
        derivatives.append((slope.detach(), *torch.autograd.grad(slope.square().sum(), x)))
    for actual, expected in zip(*derivatives, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
