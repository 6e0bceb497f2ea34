"""Gates on the output of attention.

Legend: H query heads, E per value.
"""

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import softplus

from headway.errors import check_known
from headway.nn.fused import ACTIVATIONS, gated

Gate = Literal["head", "channel"]
GATES: tuple[str, ...] = get_args(Gate)
GATE_ACTS: Mapping[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softplus": softplus}
"""The functions that a gate goes through before it multiplies."""


def check_gate(what: str, gate: str | None, act: str) -> None:
    """Raises ConfigError, which begins with `what`, for an unknown gate or gate_act."""
    if gate is not None:
        check_known(gate, GATES, f"{what}: there is no gate")
    check_known(act, GATE_ACTS, f"{what}: there is no gate_act")


def gated_heads(gate: Tensor, heads: Tensor, act: str) -> Tensor:
    """Returns act(gate) * heads, for concatenated heads [..., H E] and a gate for each head, [..., H], or for each
    channel, [..., H E]."""
    if gate.shape == heads.shape and act in ACTIVATIONS:
        return gated(gate, heads, act)
    factor = GATE_ACTS[act](gate).unsqueeze(-1)
    y: Tensor = (heads.unflatten(-1, (gate.shape[-1], -1)) * factor).flatten(-2)
    return y
