"""Losses of an output layer, without ever holding all logits.

Where ranks share the vocabulary, each makes the logits of its ids: of the softmax, ranks merge the logarithm of their
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
    """-ln softmax(layer(x))[target] of x [..., M] and targets [...], without ever holding all logits; with a `cap` c
    that of c tanh(layer(x) / c).

    `fused_cross_entropy` of a `Linear` with plain weights; for others, with a cap, and with a `label_smoothing`, 0
    included, `chunked_cross_entropy`, whose losses per target are differentiable. Raises DataError for a target that is
    not in the vocab. Where more than `SPARSE` of the targets are ignored, the layer is computed for the rest alone."""
    trained = targets != IGNORE_INDEX
    if 0 < int(trained.sum()) < (1 - SPARSE) * targets.numel():
        losses = _cross_entropy(layer, *trained_rows(x, targets), vocab, label_smoothing, cap, hits)
        each = losses.each.new_zeros(targets.shape).masked_scatter(trained, losses.each)
        right = None if losses.hits is None else trained.masked_scatter(trained, losses.hits)
        return losses._replace(each=each, hits=right)
    return _cross_entropy(layer, x, targets, vocab, label_smoothing, cap, hits)


def trained_rows(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The rows [N, M] of x [..., M] whose targets are not ignored, and these targets [N]; behind them rows of zeros,
    with ignored targets, where kernels are compiled for each N (`headway.nn.products`)."""
    trained = targets != IGNORE_INDEX
    rows, targets = x[trained], targets[trained]
    more = added_rows(rows)
    return (
        (F.pad(rows, (0, 0, 0, more)), F.pad(targets, (0, more), value=IGNORE_INDEX))
        if more
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
    how: dict[str, Any] = {"hits": hits}
    if layer.share is not None:
        # For each target a rank sends two numbers, three with hits or smoothed labels; x's gradient is summed once.
        x, entropy = layer.enter(x), VocabEntropy(layer.share, vocab)
        if label_smoothing is None:
            how |= {"vocab": vocab, "entropy": entropy.rows}
        else:
            how |= {"chunk": entropy.chunk}
    if label_smoothing is None:
        return fused_cross_entropy(x, layer.matrix, targets, bias=layer.bias, **how)
    logits = _capped(layer if layer.share is None else layer.local, cap)
    return chunked_cross_entropy(x, targets, logits, vocab, label_smoothing=label_smoothing, **how)


def _capped(layer: Callable[[Tensor], Tensor], cap: float | None) -> Callable[[Tensor], Tensor]:
    return layer if cap is None else lambda x: capped(layer(x), cap)


@dataclass(frozen=True)
class VocabEntropy:
    """Cross entropy where this rank makes the logits of its ids alone.

    Attributes:
        share: of the output layer.
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
        """`rows_entropy` of this rank's logits [N, V / R]: its kernels run as if the largest logit were the target;
        then rows are scaled to the sum over all ranks, and the real targets put in."""
        keep = targets != IGNORE_INDEX
        at, mine = placed(targets.clamp_min(0), self.ids)
        mine &= keep
        exact = torch.promote_types(logits.dtype, torch.float32)
        biased = logits if bias is None else logits.to(exact) + bias
        best, best_at = (t.unsqueeze(1) for t in biased.max(-1))
        best = best.to(exact)
        target = biased.gather(1, at[:, None]).to(exact)
        del biased
        behind, d_logits = rows_entropy(
            logits, bias, best_at[:, 0].masked_fill(~keep, IGNORE_INDEX), gradient, None
        )
        lse_local = best + behind[:, None]
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
        """`chunk_entropy` of this rank's logits."""
        raw = logits(x)
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        ignored = targets == IGNORE_INDEX
        at, mine = placed(targets.clamp_min(0), self.ids)
        with torch.no_grad():
            best, best_at = raw.max(-1)
            sent = torch.stack((best, (best_at + self.ids.start).to(best.dtype)))
            every = torch.stack(self.share.tensor.exchange.gather(sent))
            largest, first = every[:, 0].max(0).values, every[:, 0].argmax(0, keepdim=True)
            right = (every[:, 1].gather(0, first)[0] == targets) & ~ignored if hits else None
        target = raw.gather(1, at[:, None])[:, 0].masked_fill(~mine, 0.0)
        sums = [(raw - largest[:, None]).exp().sum(-1), target, *([raw.sum(-1)] if label_smoothing else [])]
        exp_sum, target, *of_all = self.share.tensor.leave(torch.stack(sums)).unbind()
        lse = largest + exp_sum.log()
        each = (lse - target).masked_fill(ignored, 0.0)
        nats = each.sum()
        if not of_all:
            return nats, nats, each, right
        even = (self.vocab * lse - of_all[0]).masked_fill(ignored, 0.0).sum()
        return (1 - label_smoothing) * nats + even * (label_smoothing / self.vocab), nats, each, right
