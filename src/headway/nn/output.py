"""Losses of an output layer, without ever holding all logits.

If ranks share the vocabulary, each computes the logits of its ids; for the softmax, ranks merge the logarithms of their
sums of exponentials, as `Partial` does (Shoeybi et al. 2019, section 3).

Legend: N targets, M width of the states, V vocab, R ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.nn.cross_entropy import (
    IGNORE_INDEX,
    Losses,
    chunked_cross_entropy,
    fused_cross_entropy,
    rows_entropy,
)
from headway.nn.linear import Linear
from headway.nn.products import added_rows
from headway.nn.scale import capped
from headway.nn.share import Share, placed
from headway.nn.weights import Plain

SPARSE = 0.25
"""If more than this share of the targets is ignored, the output layer is computed for the others only."""


def output_cross_entropy(
    layer: nn.Module,
    x: Tensor,
    targets: Tensor,
    vocab: int,
    *,
    label_smoothing: float | None = None,
    cap: float | None = None,
    hits: bool = False,
) -> Losses:
    """Returns -ln softmax(layer(x))[target] for x [..., M] and targets [...], without ever holding all logits; with a
    `cap` c, the logits are c tanh(layer(x) / c).

    Uses `fused_cross_entropy` for a `Linear` with plain weights; for other layers, with a cap, and with a
    `label_smoothing`, also if that is 0, `chunked_cross_entropy`, whose losses per target are differentiable. Raises
    DataError for a target that is not in the vocabulary. If more than `SPARSE` of the targets are ignored, the layer
    is computed only for the others."""
    trained = targets != IGNORE_INDEX
    if 0 < int(trained.sum()) < (1 - SPARSE) * targets.numel():
        losses = _cross_entropy(layer, *trained_rows(x, targets), vocab, label_smoothing, cap, hits)
        each = losses.each.new_zeros(targets.shape).masked_scatter(trained, losses.each)
        is_hit = None if losses.hits is None else trained.masked_scatter(trained, losses.hits)
        return losses._replace(each=each, hits=is_hit)
    return _cross_entropy(layer, x, targets, vocab, label_smoothing, cap, hits)


def trained_rows(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows [N, M] of x [..., M] whose targets are not ignored, and these targets [N]. If kernels are
    compiled for each N (`headway.nn.products`), rows of zeros with ignored targets are appended."""
    trained = targets != IGNORE_INDEX
    rows, targets = x[trained], targets[trained]
    padding = added_rows(rows)
    return (
        (F.pad(rows, (0, 0, 0, padding)), F.pad(targets, (0, padding), value=IGNORE_INDEX))
        if padding
        else (rows, targets)
    )


def _cross_entropy(
    layer: nn.Module,
    x: Tensor,
    targets: Tensor,
    vocab: int,
    label_smoothing: float | None,
    cap: float | None,
    hits: bool,
) -> Losses:
    if not isinstance(layer, Linear) or layer.active or not isinstance(layer.kept, Plain):
        return chunked_cross_entropy(
            x, targets, _capped(layer, cap), vocab, label_smoothing=label_smoothing or 0.0, hits=hits
        )
    if cap is not None and label_smoothing is None:
        label_smoothing = 0.0
    options: dict[str, Any] = {"hits": hits}
    if layer.share is not None:
        # For each target a rank sends two numbers, three with hits or smoothed labels; x's gradient is summed once.
        x, entropy = layer.enter(x), VocabEntropy(layer.share, vocab)
        if label_smoothing is None:
            options |= {"vocab": vocab, "entropy": entropy.rows}
        else:
            options |= {"chunk": entropy.chunk}
    if label_smoothing is None:
        return fused_cross_entropy(x, layer.matrix, targets, bias=layer.bias, **options)
    logits = _capped(layer if layer.share is None else layer.local, cap)
    return chunked_cross_entropy(x, targets, logits, vocab, label_smoothing=label_smoothing, **options)


def _capped(layer: Callable[[Tensor], Tensor], cap: float | None) -> Callable[[Tensor], Tensor]:
    return layer if cap is None else lambda x: capped(layer(x), cap)


@dataclass(frozen=True)
class VocabEntropy:
    """Cross entropy if this rank computes only the logits of its own ids.

    Attributes:
        share: the share of the output layer that this rank has.
        vocab: V.
    """

    share: Share
    vocab: int

    @property
    def ids(self) -> range:
        """This rank's ids."""
        return self.share.part(self.vocab)

    def rows(
        self, logits: Tensor, bias: Tensor | None, targets: Tensor, gradient: bool, hits: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Computes `rows_entropy` from this rank's logits [N, V / R]: the kernels run as if the largest logit were
        the target; then rows are rescaled to the sum over all ranks, and the actual targets are inserted."""
        keep = targets != IGNORE_INDEX
        at, mine = placed(targets.clamp_min(0), self.ids)
        mine &= keep
        exact = torch.promote_types(logits.dtype, torch.float32)
        biased = logits if bias is None else logits.to(exact) + bias
        best, best_at = (t.unsqueeze(1) for t in biased.max(-1))
        best = best.to(exact)
        target = biased.gather(1, at[:, None]).to(exact)
        del biased
        # With the largest logit as the target, the loss is lse_local - best, and only column best_at of the gradient
        # is not the plain softmax.
        above_best, d_logits = rows_entropy(
            logits, bias, best_at[:, 0].masked_fill(~keep, IGNORE_INDEX), gradient, None
        )
        lse_local = best + above_best[:, None]
        sent = [lse_local, target.masked_fill(~mine[:, None], 0.0)]
        if hits is not None:
            sent += [best, (best_at + self.ids.start).to(exact)]
        gathered = torch.stack(self.share.tensor.exchange.gather(torch.cat(sent, 1)))
        lse = gathered[..., 0].logsumexp(0)
        losses = torch.where(keep, lse - gathered[..., 1].sum(0), 0.0)
        if hits is not None:
            first = gathered[..., 2].argmax(0, keepdim=True)  # among equals the smallest id
            torch.logical_and(keep, gathered[..., 3].gather(0, first)[0] == targets, out=hits)
        if gradient:  # 0 in ignored rows
            lse, keep, mine = lse[:, None], keep[:, None], mine[:, None]
            d_logits.copy_(d_logits.to(exact).mul_((lse_local - lse).exp()))  # rounded once
            d_best = torch.where(keep, (best - lse).exp(), 0.0)
            d_logits.scatter_(1, best_at, d_best.to(d_logits.dtype))
            d_target = torch.where(mine, (target - lse).exp() - 1, d_logits.gather(1, at[:, None]))
            d_logits.scatter_(1, at[:, None], d_target.to(d_logits.dtype))
        return losses, d_logits

    def chunk(
        self,
        x: Tensor,
        targets: Tensor,
        logits: Callable[[Tensor], Tensor],
        label_smoothing: float,
        hits: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Computes `chunk_entropy` from this rank's logits."""
        raw = logits(x)
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        ignored = targets == IGNORE_INDEX
        at, mine = placed(targets.clamp_min(0), self.ids)
        with torch.no_grad():
            best, best_at = raw.max(-1)
            sent = torch.stack((best, (best_at + self.ids.start).to(best.dtype)))
            every = torch.stack(self.share.tensor.exchange.gather(sent))
            largest, first = every[:, 0].max(0).values, every[:, 0].argmax(0, keepdim=True)
            is_hit = (every[:, 1].gather(0, first)[0] == targets) & ~ignored if hits else None
        target = raw.gather(1, at[:, None])[:, 0].masked_fill(~mine, 0.0)
        sums = [(raw - largest[:, None]).exp().sum(-1), target, *([raw.sum(-1)] if label_smoothing else [])]
        exp_sum, target, *logit_sums = self.share.tensor.leave(torch.stack(sums)).unbind()
        lse = largest + exp_sum.log()
        each = (lse - target).masked_fill(ignored, 0.0)
        nats = each.sum()
        if not logit_sums:
            return nats, nats, each, is_hit
        uniform = (self.vocab * lse - logit_sums[0]).masked_fill(ignored, 0.0).sum()
        return (1 - label_smoothing) * nats + uniform * (label_smoothing / self.vocab), nats, each, is_hit
