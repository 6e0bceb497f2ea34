"""Changes made to a model before its decode steps are tested: weight formats, adapters, replaced parts."""

from collections.abc import Callable

import torch
from torch import nn

from headway.models import Decoder
from headway.nn import (
    Adapter,
    Lora,
    Scores,
    Share,
    attach,
    linears,
)
from headway.nn.weights import WEIGHTS
from headway.parallel import TensorParallel
from headway.scores import SoftCap
from tests.parallel.simulation import simulate


def kept_as(weights: str) -> Callable[[Decoder], None]:
    def change(model: Decoder) -> None:
        for layer in linears(model.requires_grad_(False)).values():
            layer.keep(WEIGHTS[weights].pack(layer.matrix.bfloat16().to(_dtype(weights, layer.matrix))))

    return change


def _dtype(weights: str, like: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if weights == "compressed" else like.dtype


def adapted(*loras: Lora) -> Callable[[Decoder], None]:
    """Returns a change that attaches adapters, the first to all layers; with noise, as fresh ones change nothing."""
    targets = [(), ("q_proj", "v_proj", "down_proj"), ("gate_proj",)]

    def change(model: Decoder) -> None:
        for number, lora in enumerate(loras):
            adapter = Adapter.fresh(model, lora, targets[number], seed=number)
            generator = torch.Generator().manual_seed(number)
            for value in adapter.tensors.values():
                value.add_(torch.randn(value.shape, generator=generator) * 0.1)
            attach(model, adapter, str(number))

    return change


def both(*changes: Callable[[Decoder], None]) -> Callable[[Decoder], None]:
    def change(model: Decoder) -> None:
        for apply in changes:
            apply(model)

    return change


def hooked(model: Decoder) -> None:
    model.lm_head.register_forward_hook(lambda *_: None)


def other_mlp(model: Decoder) -> None:
    model.model.blocks[1].mlp = nn.Identity()


def other_norm(model: Decoder) -> None:
    model.model.blocks[0].input_layernorm = nn.Identity()


def other_activation(model: Decoder) -> None:
    model.model.blocks[1].mlp.act = "tanh"  # type: ignore[union-attr, assignment]


def scored(model: Decoder) -> None:
    for number, block in enumerate(model.model.blocks):
        block.self_attn.score = Scores((SoftCap(1.0 + number),))


def sunk(model: Decoder) -> None:
    for number, block in enumerate(model.model.blocks):
        logit = block.self_attn.sink_logit
        assert logit is not None
        logit.data.copy_(torch.linspace(-1.0, 2.0 + number, len(logit)))


def turned(model: Decoder) -> None:
    layer = model.model.blocks[0].self_attn.q_proj
    layer.weight = nn.Parameter(layer.weight.T.contiguous().T)


def shared(model: Decoder) -> None:
    (share,) = simulate(1, lambda exchange: Share(TensorParallel(exchange), 0))
    model.lm_head.share = share
