"""Adapters of layers divided among ranks: loss and gradients of one process, and no other messages."""

import copy
from typing import Any

import pytest
import torch

from headway.models import Model
from headway.models.tensor_parallel import shard
from headway.nn import Lora, block_linears
from headway.nn.adapters import Adapter, attach
from headway.nn.weights import Nf4
from headway.parallel import Exchange, TensorParallel
from tests.parallel import steps
from tests.parallel.simulation import Counted, simulate
from tests.parallel.steps import SUM
from tests.parallel.test_tensor import Rank

ADAPTERS: dict[str, tuple[Lora, tuple[str, ...], bool]] = {
    "lora": (Lora(rank=3, alpha=5), (), False),
    "lora of some": (Lora(rank=3, alpha=5, stabilized=True), ("q_proj", "v_proj", "down_proj"), False),
    "dora": (Lora(rank=3, alpha=5, magnitude=True), (), False),
    "qlora": (Lora(rank=3, alpha=5), (), True),
    "dora, 4 bits": (Lora(rank=3, alpha=5, magnitude=True), (), True),
}


def in_4_bits(model: Model) -> Model:
    """Quantizes the linear layers of a model's blocks to nf4 in place, and returns it."""
    for layer in block_linears(model).values():
        layer.keep(Nf4.pack(layer.matrix))
    return model


def adapted_model(which: str, ranks: int = 2) -> Model:
    """Returns a model in float64 with biases, four kv heads, and an adapter with all tensors changed from their start.
    In 4 bits, rows divide into whole blocks for each rank, and groups of 256 scales span ranks."""
    lora, targets, nf4 = ADAPTERS[which]
    size: dict[str, Any] = (
        {"width": 128, "head_dim": 16 * ranks, "hidden": 192 * ranks}
        if nf4
        else {"head_dim": 4, "qkv_bias": True}
    )
    model = steps.model_of("sink", heads=8, kv_heads=4, out_bias=True, mlp_bias=True, **size)
    model = in_4_bits(model) if nf4 else model
    adapter, drawn = Adapter.fresh(model, lora, targets), torch.Generator().manual_seed(1)
    for value in adapter.tensors.values():
        value += 0.2 * torch.randn(value.shape, generator=drawn)
    attach(model, adapter, dtype=torch.float64)
    return model


def step(model: Model) -> dict[str, torch.Tensor]:
    """Returns the loss and the gradients of all trained parameters, by name."""
    ids, targets, tokens = steps.rows("sink")
    loss = model(ids, tokens=tokens, targets=targets).total / targets.numel()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {
        "loss": loss.detach(),
        **dict(zip(trained, torch.autograd.grad(loss, [*trained.values()]), strict=True)),
    }


@pytest.mark.parametrize(
    ("which", "ranks"), [*((which, 2) for which in list(ADAPTERS)[:4]), ("lora", 4), ("dora", 4)]
)
def test_row_45_adapters_of_shared_layers_have_the_loss_and_every_gradient_of_one_process(
    which: str, ranks: int
) -> None:
    model = adapted_model(which, ranks)
    expected = step(model)

    def rank(exchange: Exchange) -> dict[str, torch.Tensor]:
        local = copy.deepcopy(model)
        shards = shard(local, TensorParallel(exchange))
        results = step(local)
        shards.add_up(results)
        return {name: steps.whole(shards, name, value) for name, value in results.items()}

    assert all(value.abs().max() > 1e-6 for value in expected.values())
    for results in simulate(ranks, rank):
        torch.testing.assert_close(results, expected, **SUM)


@pytest.mark.parametrize("which", ["dora", "dora, 4 bits"])
def test_what_ranks_have_is_gathered_to_the_bit(which: str) -> None:
    """Adapters, and the codes and scales of 4-bit weights, of which each rank has half."""
    model = adapted_model(which)
    expected = {name: t.clone() for name, t in model.state_dict().items()}

    def rank(exchange: Exchange) -> dict[str, torch.Tensor]:
        local = copy.deepcopy(model)
        shard(local, TensorParallel(exchange))
        for name, layer in block_linears(local).items():
            whole = block_linears(model)[name].matrix.chunk(2, 0 if "_proj" in name and not row(name) else 1)
            assert torch.equal(layer.matrix, whole[exchange.rank]), name
        return steps.gather(local)

    for actual in simulate(2, rank):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def row(name: str) -> bool:
    """Returns whether a layer is sharded by its inputs."""
    return name.rpartition(".")[2] in ("o_proj", "down_proj")


@pytest.mark.parametrize("which", ["lora", "lora of some", "qlora", "dora"])
def test_an_adapter_sends_nothing_but_norms_of_rows(which: str) -> None:
    """Two sums a layer each way, as without adapter; DoRA adds one number for each output of o_proj and down_proj."""
    model = adapted_model(which)

    def rank(exchange: Exchange) -> list[int]:
        local, counted = copy.deepcopy(model), Counted(exchange)
        shard(local, TensorParallel(counted))
        step(local)
        return sorted(counted.summed)

    ids, _, _ = steps.rows("sink")
    norms = 2 * model.spec.layers if which == "dora" else 0
    products = 2 * 2 * model.spec.layers - 1
    expected = [model.spec.width] * norms + [ids.numel() * model.spec.width] * products
    assert simulate(2, rank) == [expected] * 2


def test_of_an_adapter_a_rank_has_what_its_layer_has() -> None:
    """Columns of A, or rows of B and m: so for the optimizer, too."""
    model = adapted_model("dora")
    before = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    shards = shard(model, TensorParallel(Rank(1, 2)))
    for name, p in model.named_parameters():
        if p.requires_grad:
            layer, _, leaf = name.partition(".adapters.default.")
            axis = {"lora_A": 1 if row(layer) else None}.get(leaf, None if row(layer) else 0)
            assert shards.axes.get(name) == axis
            assert (name in shards.summed) == (axis is None)
            assert p.numel() == before[name].numel() // (1 if axis is None else 2)
