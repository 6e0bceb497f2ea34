"""Factors and caps, which are no operation where a model has none."""

import torch
from torch import Tensor


def scaled(x: Tensor, factor: float) -> Tensor:
    """factor * x; x itself where the factor is 1."""
    return x if factor == 1.0 else x * factor


def capped(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap); x itself where there is no cap. (Gemma 2 report, section 2, "Logit soft-capping".)"""
    return x if cap is None else torch.tanh(x / cap) * cap
