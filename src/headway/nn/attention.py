"""Softmax attention over a declared pattern, as a layer.

Legend: H query heads, D per query and key.
"""

from typing import ClassVar, Unpack

import torch
from torch import nn

from headway.nn.attention_layer import AttentionLayer
from headway.nn.attention_options import AttentionOptions
from headway.nn.mixers import GlobalMixer, SoftmaxMixer
from headway.patterns import Causal, Pattern


class Attention(AttentionLayer):
    """Softmax attention over a declared pattern: `attend` between the projections of `AttentionLayer`.

    Args:
        pattern: which keys each query may see;  scale, backend: as in `attend`; scale is D^-0.5 by default.
        sink_logit: whether there is a trained sink logit for each query head, `sink_logit` [H], initially 0 (`attend`).
        others: as in `AttentionLayer`.

    (Vaswani et al. 2017, section 3.2.2.)
    """

    mixer_type: ClassVar[type[SoftmaxMixer]] = SoftmaxMixer

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        pattern: Pattern = Causal(),  # noqa: B008  (a frozen value)
        scale: float | None = None,
        backend: str = "auto",
        sink_logit: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> None:
        super().__init__(self.mixer_type(pattern, scale, backend), width, heads, kv_heads, **options)
        if sink_logit:
            self.sink_logit = nn.Parameter(torch.zeros(heads))


class GlobalAttention(Attention):
    """`Attention` whose global queries attend to all tokens by a second set of projections: see `GlobalMixer`.

    Arguments as in `Attention`."""

    mixer_type = GlobalMixer
