"""The output layer of an accelerated model: when `Logits` stand in for logits, and that they behave alike."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.integrations.transformers import loss
from headway.integrations.transformers.loss import SPARSE, Logits, output_forward
from headway.integrations.transformers.modules import (
    ROWS,
    SAMPLE,
    feedforward_sample,
    linear_sample,
    norm_sample,
)

VOCAB, WIDTH, TOKENS = 11, 6, 12


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, VOCAB, bias=bias)


def test_logits_are_stood_in_for_where_gradients_of_rows_are_asked_for() -> None:
    linear, x = layer(), numbers(2, 3, WIDTH)
    assert type(output_forward(linear, x)) is Logits
    assert type(output_forward(linear, x[0])) is Logits
    assert type(output_forward(linear, x[0, 0])) is Tensor, "one state is no row"
    with torch.no_grad():
        assert type(output_forward(linear, x)) is Tensor
    assert type(output_forward(linear, nn.Parameter(x))) is Tensor, "of a kind of its own"
    assert type(output_forward(linear.eval(), x)) is Tensor
    for logits in (output_forward(linear, x), output_forward(linear.train(), x)):
        assert logits.shape == (2, 3, VOCAB)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits + 0 * logits, F.linear(x, linear.weight, linear.bias))


def test_under_autocast_logits_are_of_its_dtype() -> None:
    linear, x = layer(), numbers(2, 3, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, expected = output_forward(linear, x), F.linear(x, linear.weight, linear.bias)
    assert logits.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(logits.computed(), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert output_forward(layer(bias=False), x).bias is None


STEPS: dict[str, Any] = {
    "as they are": lambda t: t,
    "float": lambda t: t.float(),
    "a cap": lambda t: torch.tanh(t / 2.0) * 2.0,
    "a scale": lambda t: t.mul(0.25).add(1.5),
    "a bias of the vocabulary": lambda t: t + torch.linspace(-1, 1, VOCAB)[None],
    "views": lambda t: t.float().view(-1, VOCAB).reshape((-1, VOCAB)),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("wanted", [TOKENS, 9, 8, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_is_that_of_the_logits(step: Any, wanted: int, reduction: str) -> None:
    """Value and gradients in float64, for several shares of tokens with a target."""
    linear, x = layer().double(), numbers(1, TOKENS, WIDTH).double()
    target = torch.arange(TOKENS) % VOCAB
    target[wanted:] = 7
    target[:wanted][target[:wanted] == 7] = 8
    results = []
    for logits in (output_forward(linear, x), F.linear(x, linear.weight, linear.bias)):
        flat = step(logits).view(-1, VOCAB)
        assert (type(flat) is Logits) == (type(logits) is Logits), "nothing is computed before the loss"
        value = F.cross_entropy(flat, target, ignore_index=7, reduction=reduction)
        results.append((value.detach(), *torch.autograd.grad(value, [linear.weight, linear.bias])))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_of_tokens_few_of_which_have_a_target_the_others_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If fewer than three quarters have a target; with no target at all every token is kept, and the mean is NaN."""
    rows: list[int] = []
    inner = loss.fused_cross_entropy

    def counted(x: Tensor, *arguments: Any, **options: Any) -> Any:
        rows.append(len(x))
        return inner(x, *arguments, **options)

    monkeypatch.setattr(loss, "fused_cross_entropy", counted)
    for trained in (TOKENS, 9, 8, 0):
        target = torch.full((TOKENS,), -100)
        target[:trained] = 1
        value = F.cross_entropy(output_forward(layer(), numbers(TOKENS, WIDTH)), target)
        assert value.isnan() == (trained == 0)
    assert SPARSE == 0.75
    assert rows == [12, 12, 8, 12]


@pytest.mark.parametrize(
    "other", [torch.ones(VOCAB), torch.ones(1, VOCAB, requires_grad=True), torch.ones(TOKENS, 1)]
)
def test_what_differs_by_token_or_is_trained_is_done_to_the_logits(other: Tensor) -> None:
    linear, x = layer(), numbers(TOKENS, WIDTH)
    result = output_forward(linear, x) + other
    assert type(result) is Tensor
    torch.testing.assert_close(result, F.linear(x, linear.weight, linear.bias) + other)


def test_logits_are_computed_once() -> None:
    logits = output_forward(layer(), numbers(TOKENS, WIDTH))
    assert logits.value is None
    first = logits.computed()
    assert logits.computed() is first
    assert torch.equal(logits.argmax(-1), first.argmax(-1))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(WIDTH).bfloat16())


def test_modules_are_compared_on_small_ones_in_float32() -> None:
    """Samples have three tokens; a linear layer keeps up to 64 outputs, a feed-forward gets 64 random hidden units."""
    seed = torch.Generator().manual_seed(0)
    norm = Norm()
    sample, (x,) = norm_sample(norm, seed)
    assert sample is not norm
    assert x.shape == (ROWS, WIDTH) == (3, 6)
    assert torch.equal(sample.weight, norm.weight.float())
    assert sample.weight.dtype == x.dtype == torch.float32
    for outputs, count in ((200, SAMPLE), (5, 5)):
        linear = nn.Linear(WIDTH, outputs)
        sample_linear, (x,) = linear_sample(linear, seed)
        assert (sample_linear.weight.shape, x.shape) == ((count, WIDTH), (ROWS, WIDTH))
        rows = [int((linear.weight == row).all(1).nonzero()) for row in sample_linear.weight]
        assert len({*rows}) == count, "rows of its own, each once"
        assert torch.equal(sample_linear.bias, linear.bias[rows])
    assert linear_sample(nn.Linear(WIDTH, 9, bias=False), seed)[0].bias is None
    mlp = nn.Module()
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = nn.Linear(6, 9), nn.Linear(6, 9, bias=False), nn.Linear(9, 6)
    small, (x,) = feedforward_sample(mlp, seed)
    assert x.shape == (ROWS, 6)
    assert [small.gate_proj.weight.shape, small.up_proj.weight.shape] == [(SAMPLE, 6)] * 2
    assert small.down_proj.weight.shape == (6, SAMPLE)
    assert (small.up_proj.bias is None, small.down_proj.bias is None) == (True, False)
    assert not torch.equal(small.gate_proj.weight, small.up_proj.weight)
