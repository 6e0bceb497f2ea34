"""A training step of a small model, on one process and on one rank, where ranks are processes or threads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.models import Decoder, Encoder, Head, Model, ModelSpec, build
from headway.nn import IGNORE_INDEX, Losses
from headway.parallel import ContextParallel, Exchange, ShardLayout, Shards, choose_layout
from headway.patterns import Causal, Full, Global, Pattern, Sink, Window
from headway.positions import DynamicNTK, Rotary
from headway.tokens import Tokens

VOCAB, COUNT = 31, 200
SUM = {"rtol": 1e-10, "atol": 1e-12}
"""Tolerance for sums of float64 in another order, through two layers."""

PATTERNS: dict[str, Sequence[Pattern]] = {
    "full": [Causal(), Causal()],
    "window": [Window.last(33), Window.last(20)],
    "sink": [Window.last(33) | (Causal() & Sink(4)), Causal()],
    "dilated": [Window.last(20, step=3), Window.last(9)],
    "global": [Window.around(16) | Global(), Full()],
}


def model_of(name: str, ntk: bool = False, vocab: int = VOCAB, **changes: Any) -> Decoder | Encoder:
    """Returns two layers of grouped heads in float64; "global" is an encoder. `changes` override fields of the spec."""
    bidirectional, plain = name == "global", {"dropout": 0.0, "attention_dropout": 0.0}
    fields: dict[str, Any] = (
        {"family": "bert", "causal": False, "head": Head("masked-lm"), **plain} if bidirectional else {}
    )
    if ntk:
        fields["positions"] = Rotary(1e4, pairing="halves", scaling=DynamicNTK(4.0, 64))
    defaults: dict[str, Any] = {
        "patterns": PATTERNS[name],
        "width": 16,
        "head_dim": 8,
        "hidden": 24,
        "init_std": 0.3,
    }
    spec = ModelSpec.of_depth(
        2, vocab, context=COUNT, group=None if bidirectional else 2, **{**defaults, **fields, **changes}
    )
    model = build(spec, seed=0).double()
    assert isinstance(model, Decoder | Encoder)
    return model


def rows(name: str) -> tuple[Tensor, Tensor, Tokens]:
    """Returns ids, targets, and tokens with documents or global tokens. Some targets are ignored: all of the second
    quarter of a row, which is one of four contiguous shards."""
    random = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB, (2, COUNT), generator=random)
    targets = torch.randint(VOCAB, (2, COUNT), generator=random)
    targets[:, 50:100] = IGNORE_INDEX
    targets[torch.rand(2, COUNT, generator=random) < 0.3] = IGNORE_INDEX
    tokens = Tokens.packed([[70, 120], [200]], COUNT)
    return ids, targets, tokens.with_global([0, 31]) if name == "global" else tokens


def step(
    model: Decoder | Encoder, name: str, exchange: Exchange | None = None, layout: ShardLayout | None = None
) -> list[Tensor]:
    """Returns the loss per trained token and the gradient of every parameter; those of ranks must be summed.
    Ranks have the slots of `layout`; by default the one that is chosen."""
    ids, targets, tokens = rows(name)
    trained = int((targets != IGNORE_INDEX).sum())
    if exchange is None:
        losses = model(ids, tokens=tokens, targets=targets)
    else:
        layout = layout or choose_layout(model.spec.patterns, tokens, exchange.ranks)[0]
        context = ContextParallel(tokens, layout, exchange)
        losses = model(context.take(ids), context=context, targets=context.take(targets))
    assert isinstance(losses, Losses)
    loss = losses.total / trained
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)]


def whole(shards: Shards, name: str, part: Tensor) -> Tensor:
    """Joins a parameter, or its gradient, from the parts of all ranks; every rank must call it."""
    if name not in shards.axes or not part.dim():
        return part
    return torch.cat(shards.tensor.exchange.gather(part.detach()), shards.axes[name])


def gather(model: Model) -> dict[str, Tensor]:
    """Returns the state dict of the whole model, joined from all ranks."""
    assert model.shards is not None
    return {name: whole(model.shards, name, value) for name, value in model.state_dict().items()}
