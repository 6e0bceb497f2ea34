"""Additive attention masks, and a softmax that gives zeros for a row without visible keys."""

import torch
from torch import Tensor, nn


def causal_mask(size: int, device: torch.device | str | None = None) -> Tensor:
    """Returns a causal mask (1, 1, size, size): -inf above the diagonal, 0 on and below it.

    A token attends to itself and to earlier tokens. One document says that q_t must not see k_t "and later"; only
    later keys are hidden, and the diagonal stays visible (otherwise the first token would attend to nothing at all).
    """
    return torch.full((1, 1, size, size), float("-inf"), device=device).triu(diagonal=1)


def padding_scores(padding_mask: Tensor, batch: int, keys: int) -> Tensor:
    """Returns a padding mask (b, keys) as (b, 1, 1, keys) to add to the scores: 0 for real tokens, -inf for padding.

    bool      True = real token, False = padding (the usual attention_mask, as bool)
    additive  0 = real token, -inf = padding. The document prints the opposite (padding 0, real tokens -inf), which
              would attend to padding only

    Raises ValueError for another shape, for integers, and for floats other than 0 and -inf: a 0/1 mask in floats would
    be added as a bias of 1 and hide nothing, and a large negative number leaks into rows that have no visible key.
    """
    if tuple(padding_mask.shape) != (batch, keys):
        raise ValueError(
            f"padding_mask must be (batch, keys) = ({batch}, {keys}), cached keys first, "
            f"got {tuple(padding_mask.shape)}"
        )
    if padding_mask.dtype == torch.bool:
        scores = torch.zeros(batch, keys, device=padding_mask.device)
        scores = scores.masked_fill(~padding_mask, float("-inf"))
    elif padding_mask.is_floating_point():
        if not ((padding_mask == 0) | (padding_mask == float("-inf"))).all():
            raise ValueError(
                "an additive padding_mask holds 0 (real token) and -inf (padding) only; "
                "pass a 0/1 mask as mask.bool()"
            )
        scores = padding_mask
    else:
        raise ValueError(
            f"padding_mask must be bool (True = real token) or additive floats, got {padding_mask.dtype}; "
            "pass a 0/1 mask as mask.bool()"
        )
    return scores[:, None, None, :]


def masked_softmax(scores: Tensor) -> Tensor:
    """Returns the softmax over the last axis, computed in float32 or float64; a row of -inf gives zeros and zero
    gradients, not NaN.
    """
    wide = scores if scores.dtype == torch.float64 else scores.float()
    no_visible_key = (wide == float("-inf")).all(-1, keepdim=True)
    return wide.masked_fill(no_visible_key, 0.0).softmax(-1).masked_fill(no_visible_key, 0.0).to(scores.dtype)


class MaskedSoftmax(nn.Module):
    """`masked_softmax` as a module, so that hooks can observe scores and weights."""

    def forward(self, scores: Tensor) -> Tensor:
        """Returns the attention weights for scores (b, h, s, keys), in the same shape."""
        return masked_softmax(scores)
