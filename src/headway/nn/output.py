"""Losses of an output layer, without ever holding all logits.

Legend: M width of the states, V vocab.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from headway.nn.cross_entropy import IGNORE_INDEX, Losses, chunked_cross_entropy, fused_cross_entropy
from headway.nn.linear import Linear
from headway.nn.vocab_parallel import VocabEntropy
from headway.nn.weights import Plain

SPARSE = 0.25


def output_cross_entropy(
    layer: nn.Module,
    x: Tensor,
    targets: Tensor,
    vocab: int,
    *,
    label_smoothing: float | None = None,
    hits: bool = False,
) -> Losses:
    """-ln softmax(layer(x))[target] of x [..., M] and targets [...], without ever holding all logits.

    `fused_cross_entropy` of a `Linear` with plain weights; for others, and with a `label_smoothing`, 0 included,
    `chunked_cross_entropy`, whose losses per target are differentiable. Raises DataError for a target that is not in
    the vocab. Where more than `SPARSE` of the targets are ignored, the layer is computed for the rest alone."""
    wanted = targets != IGNORE_INDEX
    if 0 < int(wanted.sum()) < (1 - SPARSE) * targets.numel():
        losses = output_cross_entropy(
            layer, x[wanted], targets[wanted], vocab, label_smoothing=label_smoothing, hits=hits
        )
        each = losses.each.new_zeros(targets.shape).masked_scatter(wanted, losses.each)
        right = None if losses.hits is None else wanted.masked_scatter(wanted, losses.hits)
        return losses._replace(each=each, hits=right)
    if not isinstance(layer, Linear) or layer.active or not isinstance(layer.kept, Plain):
        return chunked_cross_entropy(
            x, targets, layer, vocab, label_smoothing=label_smoothing or 0.0, hits=hits
        )
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
    logits = layer if layer.share is None else layer.local
    return chunked_cross_entropy(x, targets, logits, vocab, label_smoothing=label_smoothing, **how)
