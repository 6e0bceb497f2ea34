"""What is done to a model before its steps are tried: other weights, adapters, parts of another kind."""

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
    def change(made: Decoder) -> None:
        for layer in linears(made.requires_grad_(False)).values():
            layer.keep(WEIGHTS[weights].pack(layer.matrix.bfloat16().to(_dtype(weights, layer.matrix))))

    return change


def _dtype(weights: str, like: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if weights == "compressed" else like.dtype


def adapted(*loras: Lora) -> Callable[[Decoder], None]:
    """No part of an adapter is as it began; each is on some layers, of all that the first is on."""
    targets = [(), ("q_proj", "v_proj", "down_proj"), ("gate_proj",)]

    def change(made: Decoder) -> None:
        for number, lora in enumerate(loras):
            adapter = Adapter.fresh(made, lora, targets[number], seed=number)
            drawn = torch.Generator().manual_seed(number)
            for value in adapter.tensors.values():
                value.add_(torch.randn(value.shape, generator=drawn) * 0.1)
            attach(made, adapter, str(number))

    return change


def both(*changes: Callable[[Decoder], None]) -> Callable[[Decoder], None]:
    def change(made: Decoder) -> None:
        for one in changes:
            one(made)

    return change


def hooked(made: Decoder) -> None:
    made.lm_head.register_forward_hook(lambda *_: None)


def other_mlp(made: Decoder) -> None:
    made.model.blocks[1].mlp = nn.Identity()


def other_norm(made: Decoder) -> None:
    made.model.blocks[0].input_layernorm = nn.Identity()


def other_activation(made: Decoder) -> None:
    made.model.blocks[1].mlp.act = "tanh"  # type: ignore[union-attr, assignment]


def scored(made: Decoder) -> None:
    for number, block in enumerate(made.model.blocks):
        block.self_attn.score = Scores((SoftCap(1.0 + number),))


def sunk(made: Decoder) -> None:
    for number, block in enumerate(made.model.blocks):
        logit = block.self_attn.sink_logit
        assert logit is not None
        logit.data.copy_(torch.linspace(-1.0, 2.0 + number, len(logit)))


def turned(made: Decoder) -> None:
    layer = made.model.blocks[0].self_attn.q_proj
    layer.weight = nn.Parameter(layer.weight.T.contiguous().T)


def shared(made: Decoder) -> None:
    (share,) = simulate(1, lambda exchange: Share(TensorParallel(exchange), 0))
    made.lm_head.share = share
