"""Longformer's attention on headway's kernels: `GlobalMixer` with the projections of a `LongformerSelfAttention`
(Beltagy et al. 2020, section 3.1).

Legend: B rows, N tokens, M width, H heads, D per head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from headway.integrations.transformers.products import side_by_side
from headway.nn import RotaryEmbedding, Scores
from headway.nn.mixers import Call, GlobalMixer
from headway.patterns import GlobalKeys, Window
from headway.positions import NoPositions, Rotation
from headway.tokens import Tokens


def longformer_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor,
    is_index_masked: Tensor | None = None,
    is_index_global_attn: Tensor | None = None,
    is_global_attn: bool | None = None,
    output_attentions: bool = False,
) -> tuple[Tensor, ...]:
    """Returns (states [B, N, M],) from states [B, N, M] and a mask [B, N] that is below 0 on padding and above 0 on
    global tokens.

    If attention weights are requested, the class computes them itself, since our kernels never build them."""
    if output_attentions:
        flags = is_index_masked, is_index_global_attn, is_global_attn, True
        output: tuple[Tensor, ...] = type(self).forward(self, hidden_states, attention_mask, *flags)
        return output
    slots = torch.arange(hidden_states.shape[1], device=attention_mask.device)
    index = torch.where(attention_mask < 0, -1, slots)
    tokens = Tokens(index, is_global=attention_mask > 0 if is_global_attn else None)
    if bool((index >= 0).all()):
        tokens = Tokens(index, is_global=tokens.is_global, start=0)
    mixer = GlobalMixer(Window.around(self.one_sided_attn_window_size) | GlobalKeys())
    out = mixer.attend(Projected(self), hidden_states, Call(tokens, None, None, None, ()))
    return (out.transpose(1, 2).flatten(2),)


class Projected:
    """The projections of a `LongformerSelfAttention` with the interface of a mixer
    (`headway.nn.mixers.Projections`)."""

    rotary, score, sink_logit = RotaryEmbedding(NoPositions(), 1), Scores(), None
    kv_from: nn.Module | None = None

    def __init__(self, module: Any) -> None:
        self.module, self.dropout, self.training = module, module.dropout, module.training

    def projected(
        self, x: Tensor, names: str = "qkv", of_global: bool = False, rotation: Rotation | None = None
    ) -> list[Tensor]:
        """Returns queries, keys or values [B, H, N, D], one for each of `names`; Longformer has no rotation."""
        assert rotation is None
        module, sizes = self.module, (self.module.num_heads, self.module.head_dim)
        whole = {"q": "query", "k": "key", "v": "value"}
        layers = [getattr(module, f"{whole[name]}_global" if of_global else whole[name]) for name in names]
        return [t.unflatten(-1, sizes).transpose(1, 2) for t in side_by_side(x, layers)]
