"""Cross entropy over a large vocabulary without ever holding all of its logits.

Legend: N targets, M model width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from headway.errors import DataError
from headway.native import rows as native
from headway.nn.products import forward_product, input_product, weight_product

IGNORE_INDEX = -100
RowsEntropy = Callable[[Tensor, Tensor | None, Tensor, bool, Tensor | None], tuple[Tensor, Tensor]]
ChunkEntropy = Callable[
    [Tensor, Tensor, Callable[[Tensor], Tensor], float, bool], tuple[Tensor, Tensor, Tensor, Tensor | None]
]
CHUNK_BYTES = 32 << 20  # size of one chunk of fp32 logits


def chunk_rows(vocab: int) -> int:
    """Returns how many tokens have fp32 logits that fit in `CHUNK_BYTES`; at least 64, so that the product stays a
    matrix product."""
    return max(64, CHUNK_BYTES // (4 * vocab))


class Losses(NamedTuple):
    """Cross entropy of targets [...], in nats.

    total   scalar, differentiable: the loss to be minimised, summed over the targets that are not `IGNORE_INDEX`
    nats    scalar, without gradient: the sum of -ln p(target), which equals `total` unless labels are smoothed
    tokens  number of targets that are not ignored
    each    [...] -ln p(target), 0 where ignored
    hits    [...] bool, whether the target is the most probable token (the smallest id among equals), False where
            ignored; None if not requested
    """

    total: Tensor
    nats: Tensor
    tokens: int
    each: Tensor
    hits: Tensor | None


class _FusedCrossEntropy(torch.autograd.Function):
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
        entropy: RowsEntropy,
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
            hits = None if hits_N is None else hits_N[start : start + rows]
            gradient = want_h or want_w or want_b
            losses_N[start : start + rows], d_logits = entropy(
                forward_product(h, weight_VM), bias_V, target, gradient, hits
            )
            if grad_b is not None:
                grad_b += d_logits.sum(0, dtype=exact)
            d_logits = d_logits.to(h.dtype)
            if grad_h is not None:
                grad_h[start : start + rows] = input_product(d_logits, weight_VM)
            if grad_w is not None:
                grad_w += weight_product(d_logits, h)
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
        return h, w, b, None, None, None, None, None


def rows_entropy(
    logits: Tensor, bias: Tensor | None, targets: Tensor, gradient: bool, hits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns -ln softmax(logits + bias)[target] of rows [N, V], 0 where ignored, and, if `gradient`, softmax -
    onehot, which overwrites the logits. `hits` [N] is filled in if given."""
    if native.runs(logits, bias):
        return native.cross_entropy(logits, bias, targets, gradient, hits), logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if bias is not None:
        logits += bias
    keep, index = targets != IGNORE_INDEX, targets.clamp_min(0)[:, None]
    lse = torch.logsumexp(logits, dim=-1)
    losses = torch.where(keep, lse - logits.gather(1, index)[:, 0], 0.0)
    if hits is not None:
        torch.logical_and(keep, logits.argmax(-1) == targets, out=hits)
    if gradient:
        logits.sub_(lse[:, None]).exp_()
        logits.scatter_add_(1, index, torch.full_like(logits[:, :1], -1.0))
        logits.masked_fill_(~keep[:, None], 0.0)
    return losses, logits


def fused_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    hits: bool = False,
    vocab: int | None = None,
    entropy: RowsEntropy = rows_entropy,
) -> Losses:
    """Returns -ln softmax(hidden @ weight.T + bias)[target], for an output layer that is one plain product.

    The logits exist for `chunk_rows` tokens at a time, about 32 MiB; their gradient is formed in the forward pass,
    while they exist, so the backward pass only multiplies by one number (the idea of fused linear cross entropy,
    Liger-Kernel). Logits have the dtype of `hidden` times `weight`; the softmax is in float32 (float64 for float64).

    Args:
        hidden: `[..., M]`, the last hidden states. weight: `[V, M]`, the output matrix, same dtype. bias: `[V]`.
        targets: `[...]` token ids; `IGNORE_INDEX` (-100) is not trained on.
        hits: whether to compute `Losses.hits`.
        vocab, entropy: V and a replacement of `rows_entropy`, if `weight` has only one rank's rows of the vocabulary.
    Returns `Losses`; `total` is differentiable once in `hidden`, `weight` and `bias`, `each` is not.
    Raises DataError for a target that is neither `IGNORE_INDEX` nor a token id.
    """
    flat, count = _checked(targets, vocab or len(weight))
    total, each, hits_N = _FusedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(len(flat), hidden.shape[-1]),
        weight,
        bias,
        flat,
        chunk_rows(len(weight)),
        torch.is_grad_enabled(),
        hits,
        entropy,
    )
    shape = targets.shape
    return Losses(
        total, total.detach(), count, each.view(shape), None if hits_N is None else hits_N.view(shape)
    )


def chunked_cross_entropy(
    hidden: Tensor,
    targets: Tensor,
    logits: Callable[[Tensor], Tensor],
    vocab: int,
    *,
    label_smoothing: float = 0.0,
    hits: bool = False,
    chunk: ChunkEntropy | None = None,
) -> Losses:
    """Computes `fused_cross_entropy` for any output layer, also with smoothed labels (Vaswani et al. 2017, section
    5.4):

        total = sum over targets of (1 - e) -ln p(target) + e mean over V of -ln p        e: `label_smoothing`

    `logits` maps [rows, M] to [rows, V] and may be quantized or adapted. All chunks but the last recompute their logits
    in the backward pass, so that only one chunk of them exists at a time; a call that fits one chunk computes them
    once. The softmax is in float32 (float64 for float64). `total` and `each` are differentiable.

    Args and errors as in `fused_cross_entropy`; `vocab` is V, and `chunk` replaces `chunk_entropy` if `logits` computes
    only one rank's part of them.
    """
    flat, count = _checked(targets, vocab)
    x, step = hidden.reshape(len(flat), hidden.shape[-1]), chunk_rows(vocab)
    redo = torch.is_grad_enabled()
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = []
    run = chunk or chunk_entropy
    for start in range(0, max(len(flat), 1), step):
        args = (x[start : start + step], flat[start : start + step], logits, label_smoothing, hits)
        is_last = start + step >= len(flat)
        parts.append(run(*args) if is_last or not redo else checkpoint(run, *args, use_reentrant=False))
    totals, nats, each, chunk_hits = zip(*parts, strict=True)
    return Losses(
        sum(totals[1:], start=totals[0]),
        sum(nats[1:], start=nats[0]).detach(),
        count,
        torch.cat(each).view(targets.shape),
        torch.cat(chunk_hits).view(targets.shape) if hits else None,
    )


def chunk_entropy(
    x: Tensor, targets: Tensor, logits: Callable[[Tensor], Tensor], label_smoothing: float, hits: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns total and nats of some rows, summed; the nats of each row; and the hits."""
    raw = logits(x)
    log_p = raw.to(torch.promote_types(raw.dtype, torch.float32)).log_softmax(-1)
    nats = F.nll_loss(log_p, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    each = F.nll_loss(log_p, targets, ignore_index=IGNORE_INDEX, reduction="none")
    ignored = targets == IGNORE_INDEX
    hit = (log_p.argmax(-1) == targets) & ~ignored if hits else None
    if label_smoothing == 0:
        return nats, nats, each, hit
    uniform = -log_p.sum(-1).masked_fill(ignored, 0.0)
    return (1 - label_smoothing) * nats + uniform.sum() * (label_smoothing / log_p.shape[-1]), nats, each, hit


def _checked(targets: Tensor, vocab: int) -> tuple[Tensor, int]:
    """Returns the flattened targets, and how many of them are not ignored. Raises DataError for a target outside the
    vocabulary."""
    flat = targets.reshape(-1)
    trained = flat != IGNORE_INDEX
    is_outside = trained & ((flat < 0) | (flat >= vocab))
    if bool(is_outside.any()):
        raise DataError(
            f"target {int(flat[is_outside][0])} is neither in 0..{vocab - 1}, the model's vocab, nor {IGNORE_INDEX} "
            "(ignored); use the tokenizer that the model was trained with"
        )
    return flat, int(trained.sum())
