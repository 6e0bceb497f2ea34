"""Cross entropy over a large vocabulary without ever holding all of its logits."""

# Legend: N tokens, M model width, V vocabulary.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from headway.errors import DataError

IGNORED = -100
CHUNK_BYTES = 32 << 20  # of one chunk of fp32 logits


def chunk_rows(vocab: int) -> int:
    """Tokens whose fp32 logits fit in `CHUNK_BYTES`; at least 64, so that the product stays a matrix product."""
    return max(64, CHUNK_BYTES // (4 * vocab))


class Losses(NamedTuple):
    """total: scalar in nats, differentiable. each: nats per token, 0 where ignored. hits: bool, whether the token is
    the most probable one (of equals the smallest id); None unless asked for."""

    total: Tensor
    each: Tensor
    hits: Tensor | None


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NM: Tensor,
        weight_VM: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        rows: int,
        grad: bool,
        count: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        exact = torch.promote_types(hidden_NM.dtype, torch.float32)
        losses_N = hidden_NM.new_zeros(len(targets_N), dtype=exact)
        hits_N = torch.zeros_like(targets_N, dtype=torch.bool) if count else None
        want_h, want_w, want_b = (needed and grad for needed in ctx.needs_input_grad[:3])
        grad_h = torch.zeros_like(hidden_NM) if want_h else None
        grad_w = torch.zeros_like(weight_VM, dtype=exact) if want_w else None
        grad_b = torch.zeros_like(bias_V, dtype=exact) if want_b and bias_V is not None else None
        for start in range(0, len(targets_N), rows):
            h, target = hidden_NM[start : start + rows], targets_N[start : start + rows]
            keep = target != IGNORED
            logits = (h @ weight_VM.T).to(exact)
            if bias_V is not None:
                logits += bias_V
            lse = torch.logsumexp(logits, dim=-1)
            index = target.clamp_min(0)[:, None]
            picked = logits.gather(1, index)[:, 0]
            losses_N[start : start + rows] = torch.where(keep, lse - picked, 0.0)
            if hits_N is not None:
                hits_N[start : start + rows] = keep & (logits.argmax(-1) == target)
            if not (want_h or want_w or want_b):
                continue
            # d loss / d logits = softmax - onehot, 0 for ignored tokens; in place of the logits.
            logits.sub_(lse[:, None]).exp_()
            logits.scatter_add_(1, index, torch.full_like(logits[:, :1], -1.0))
            logits.masked_fill_(~keep[:, None], 0.0)
            if grad_b is not None:
                grad_b += logits.sum(0)
            d_logits = logits.to(h.dtype)
            if grad_h is not None:
                torch.mm(d_logits, weight_VM, out=grad_h[start : start + rows])
            if grad_w is not None:
                grad_w += d_logits.T @ h
        ctx.weight_dtype = weight_VM.dtype
        ctx.save_for_backward(grad_h, grad_w, grad_b)
        ctx.mark_non_differentiable(losses_N, *(() if hits_N is None else (hits_N,)))
        return losses_N.sum(dtype=torch.float64).to(exact), losses_N, hits_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_w, grad_b = ctx.saved_tensors
        h = None if grad_h is None else grad_h * grad_total.to(grad_h.dtype)
        w = None if grad_w is None else (grad_w * grad_total).to(ctx.weight_dtype)
        b = None if grad_b is None else (grad_b * grad_total).to(ctx.weight_dtype)
        return h, w, b, None, None, None, None


def cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    hits: bool = False,
    rows: int | None = None,
) -> Losses:
    """Sum over tokens of -log softmax(hidden @ weight.T + bias)[target], and the same per token.

    The logits exist for `rows` tokens at a time (by default about 32 MiB of them); their gradient is formed
    at once, while they are there, so the backward pass multiplies by one number (the idea of fused linear
    cross entropy, Liger-Kernel). Logits are in the dtype of `hidden` times `weight`, the softmax in float32
    (float64 for float64).

    Args:
        hidden: `[..., M]`, the last hidden states. weight: `[V, M]`, the output matrix, same dtype. bias: `[V]`.
        targets: `[...]` token ids; `IGNORED` (-100) is not trained on.
        hits: whether to say which tokens are the most probable ones.
    Returns:
        total: float32 scalar in nats, differentiable in `hidden`, `weight` and `bias` (once).
        each: `[...]` float32 nats per token, 0 where ignored, not differentiable.
        hits: `[...]` bool, False where ignored; None unless asked for.
    Raises DataError for a target that is neither `IGNORED` nor a token id.
    """
    flat = targets.reshape(-1)
    outside = (flat != IGNORED) & ((flat < 0) | (flat >= len(weight)))
    if bool(outside.any()):
        raise DataError(
            f"target {int(flat[outside][0])} is not in 0..{len(weight) - 1}, the model's vocab, and not {IGNORED} "
            "(not trained on); were these ids made by another tokenizer?"
        )
    total, each, found = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(len(flat), -1),
        weight,
        bias,
        flat,
        rows or chunk_rows(len(weight)),
        torch.is_grad_enabled(),
        hits,
    )
    return Losses(total, each.view(targets.shape), None if found is None else found.view(targets.shape))


def plain_cross_entropy_sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None
) -> Tensor:
    """What `cross_entropy_sum` computes, with all logits at once: the reference."""
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.reshape(-1), ignore_index=IGNORED, reduction="sum")
