"""Bytes that training holds, counted from the spec."""

from __future__ import annotations

import torch

from headway.models.cost.activations import Loss, Scores, activation_bytes
from headway.models.cost.weights import weight_bytes
from headway.models.spec import ModelSpec


def training_bytes(
    spec: ModelSpec,
    context: int,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    *,
    source: int | None = None,
    scores: Scores = "recomputed",
    loss: Loss = "fused",
    gradient_checkpointing: bool = False,
) -> dict[str, int]:
    """Bytes that training holds at the end of a forward pass, by cause: parameters, gradients and AdamW's
    two moments (all in `dtype`), and `activation_bytes`, whose arguments these are."""
    own = weight_bytes(spec, dtype)
    held = {"parameters": own, "gradients": own, "optimizer": 2 * own}
    return held | activation_bytes(
        spec,
        context,
        batch,
        dtype,
        source=source,
        scores=scores,
        loss=loss,
        gradient_checkpointing=gradient_checkpointing,
    )
