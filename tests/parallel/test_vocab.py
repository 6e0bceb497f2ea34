"""A vocabulary divided among ranks: loss, gradients, hits and logits equal those of one process."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.errors import DataError
from headway.models import Model
from headway.models.tensor_parallel import shard
from headway.nn import (
    IGNORE_INDEX,
    Linear,
    Losses,
    Share,
    TokenEmbedding,
    cross_entropy,
    output_cross_entropy,
)
from headway.parallel import Exchange, TensorParallel
from tests.parallel import steps
from tests.parallel.simulation import simulate
from tests.parallel.test_tensor import Rank, assert_shared

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("sink", {}),
    "of its own, with biases": ("sink", {"tied": False, "output_bias": True}),
    "masked": ("global", {"tied": True, "output_bias": True}),
}


def model_of(which: str, vocab: int = 32) -> Model:
    name, fields = VARIANTS[which]
    model = steps.model_of(name, vocab=vocab, heads=8, kv_heads=4, head_dim=4, **fields)
    with torch.no_grad():
        for p in model.parameters():  # biases start as 0
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype)
    return model


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("which", VARIANTS)
def test_row_45_a_shared_vocab_has_the_loss_and_every_gradient_of_one_process(
    which: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the loss in chunks of rows; each rank has its rows of the embedding and of the output."""
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda vocab: 64)
    model, name = model_of(which), VARIANTS[which][0]
    assert_shared(model, name, ranks)
    assert shard(model, TensorParallel(Rank(1, ranks))).axes["model.embed_tokens.weight"] == 0
    assert any(isinstance(m, TokenEmbedding) and m.share for m in model.modules())
    outputs = [m for m in model.modules() if isinstance(m, Linear) and m.is_output]
    assert outputs
    assert all(layer.share is not None and layer.matrix.shape[0] == 32 // ranks for layer in outputs)


def test_a_vocab_that_ranks_do_not_divide_is_whole_on_all() -> None:
    model = model_of("tied", 30)
    axes = shard(model, TensorParallel(Rank(1, 4))).axes
    assert model.lm_head(torch.zeros(3, 16, dtype=torch.float64)).shape == (3, 30)
    assert "model.embed_tokens.weight" not in axes


@pytest.mark.parametrize("which", VARIANTS)
def test_logits_are_gathered_where_they_are_asked_for(which: str) -> None:
    """Logits without targets are those of the whole vocabulary, and have a gradient."""
    model, (ids, _, tokens) = model_of(which), steps.rows(VARIANTS[which][0])
    weights = torch.randn(2, steps.COUNT, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def run(net: Model) -> tuple[Tensor, dict[str, Tensor]]:
        logits = net(ids, tokens=tokens)
        named = dict(net.named_parameters())
        gradients = torch.autograd.grad((weights * logits).sum(), [*named.values()])
        return logits.detach(), dict(zip(named, gradients, strict=True))

    def rank(exchange: Exchange) -> tuple[Tensor, dict[str, Tensor]]:
        local = copy.deepcopy(model)
        shards = shard(local, TensorParallel(exchange))
        logits, gradients = run(local)
        shards.add_up(gradients)
        return logits, {name: steps.whole(shards, name, gradient) for name, gradient in gradients.items()}

    for gradients in simulate(2, rank):
        torch.testing.assert_close(gradients, run(model), rtol=1e-9, atol=1e-10)


def part(layer: Linear, exchange: Exchange) -> Linear:
    layer = copy.deepcopy(layer)
    layer.divide(Share(TensorParallel(exchange), 0, joined=True))
    return layer


def losses(layer: Linear, x: Tensor, targets: Tensor, smoothing: float | None) -> tuple[Losses, list[Tensor]]:
    """Returns losses, and the gradients for x and the layer's parameters."""
    x = x.clone().requires_grad_()
    result = output_cross_entropy(layer, x, targets, 90, label_smoothing=smoothing, hits=True)
    return result, list(torch.autograd.grad(result.total, [x, *layer.parameters()]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("smoothing", [None, 0.0, 0.2])
def test_entropy_of_parts(dtype: torch.dtype, bias: bool, smoothing: float | None) -> None:
    """Also by the kernels; targets lie on every rank, some logits are -inf, and ties go to the smallest id."""
    drawn = torch.Generator().manual_seed(0)
    layer = Linear.output(16, 90, bias=bias)
    with torch.no_grad():
        layer.weight.normal_(generator=drawn)
        layer.weight[60:] = layer.weight[:30]  # equal logits on different ranks
        if dtype == torch.float64:
            layer.weight[88] *= 1000  # a logit whose exponential overflows
        if bias and smoothing is None:
            layer.bias[torch.tensor([0, 30, 31, 60, 89])] = -torch.inf
    layer.to(dtype)
    x = torch.randn(70, 16, generator=drawn).to(dtype)
    targets = layer(x).argmax(1)
    targets[::3] = torch.randint(1, 29, (24,), generator=drawn)
    targets[5::7] = IGNORE_INDEX
    expected, gradients = losses(layer, x, targets, smoothing)

    def rank(exchange: Exchange) -> tuple[Losses, list[Tensor]]:
        actual, (dx, *local_gradients) = losses(part(layer, exchange), x, targets, smoothing)
        return actual, [dx, *(torch.cat(exchange.gather(g)) for g in local_gradients)]

    tolerances = {torch.float64: (1e-10, 1e-12), torch.float32: (2e-5, 2e-5), torch.bfloat16: (3e-2, 6e-2)}[
        dtype
    ]
    for actual, theirs in simulate(3, rank):
        assert actual.tokens == expected.tokens
        assert torch.equal(actual.hits, expected.hits)
        for ours, whole in (
            (actual.total, expected.total),
            (actual.each, expected.each),
            (theirs, gradients),
        ):
            torch.testing.assert_close(ours, whole, rtol=tolerances[0], atol=tolerances[1])


@given(ids=st.lists(st.integers(0, 11), min_size=1, max_size=9), ranks=st.sampled_from([1, 2, 3, 4]))
def test_rows_are_looked_up_to_the_bit(ids: list[int], ranks: int) -> None:
    table, at = TokenEmbedding(12, 3), torch.tensor([ids])
    expected = table(at)

    def rank(exchange: Exchange) -> tuple[Tensor, Tensor]:
        local = copy.deepcopy(table)
        local.divide(Share(TensorParallel(exchange), 0))
        y = local(at)
        return y.detach(), torch.cat(exchange.gather(torch.autograd.grad(y.square().sum(), local.weight)[0]))

    (gradient,) = torch.autograd.grad(expected.square().sum(), table.weight)
    for y, theirs in simulate(ranks, rank):
        assert torch.equal(y, expected)
        assert torch.equal(theirs, gradient)


def test_ids_are_those_of_all_ranks() -> None:
    embedding = TokenEmbedding(12, 3)
    embedding.divide(Share(TensorParallel(Rank(0, 2)), 0))
    with pytest.raises(DataError, match=r"token id 12 .* is not in 0\.\.11"):
        embedding(torch.tensor([[7, 12]]))
    output = part(Linear.output(3, 12), Rank(0, 2))
    with pytest.raises(DataError, match=r"target 12 is neither in 0\.\.11"):
        output_cross_entropy(output, torch.zeros(1, 3), torch.tensor([12]), 12)
