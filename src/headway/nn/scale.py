"""Factors and caps, which cost no operation in models without them."""

import torch
from torch import Tensor


def scaled(x: Tensor, factor: float) -> Tensor:
    """Returns factor * x, or x itself if the factor is 1."""
    return x if factor == 1.0 else x * factor


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Returns cap * tanh(x / cap), or x itself if there is no cap. (Gemma 2 report, section 2, "Logit
    soft-capping".)"""
    return x if cap is None else torch.tanh(x / cap) * cap
