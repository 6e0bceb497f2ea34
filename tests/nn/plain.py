"""Unfused references for the fused functions of `headway.nn`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.nn import IGNORE_INDEX


def plain_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Returns the `total` of `fused_cross_entropy`, computed from all logits at once."""
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum")
