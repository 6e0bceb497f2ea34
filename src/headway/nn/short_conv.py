"""The layer of a gated short convolution.

Legend: B rows, T tokens, M width, W tokens in the window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway.attention.delta import short_convolution
from headway.cache import StateSpec, state_dtype
from headway.errors import check_whole
from headway.nn.linear import Linear
from headway.nn.mixing import InOrder, StateLayer, drawn


@dataclass(frozen=True, kw_only=True)
class ShortConv:
    """A gated convolution over a few tokens (`ShortConvolution`).

    conv: number of tokens in its window, W.   bias: whether the convolution and both projections have biases.

    Raises ConfigError for a conv below 1.
    """

    conv: int = 3
    bias: bool = False

    def __post_init__(self) -> None:
        check_whole("ShortConv: conv", self.conv)


class ShortConvolution(StateLayer):
    """A convolution between two gates, channel by channel.

        b, c, u = x Wb, x Wc, x Wu
        y       = (c * conv(b * u)) Wo                over W tokens

    Parameters: in_proj [3 M, M] of b, c and u, conv [M, W], o_proj [M, M]; with biases conv_bias [M] and those of the
    projections. There are no positions, because the convolution depends on the order of the last W tokens.

    Args:
        width: M.
        short: W, and whether there are biases.
        output_dropout: probability for the output, in training mode.

    (LFM2: Liquid AI 2025, section 2.)
    """

    def __init__(self, width: int, short: ShortConv, *, output_dropout: float = 0.0) -> None:
        super().__init__(width, short, output_dropout)
        self.short = short
        self.in_proj = Linear(width, 3 * width, bias=short.bias)
        self.conv = nn.Parameter(torch.empty(width, short.conv))
        self.conv_bias = nn.Parameter(torch.zeros(width)) if short.bias else None
        self.o_proj = Linear(width, width, bias=short.bias)
        self.initialize_()

    def initialize_(self, generator: torch.Generator | None = None) -> None:
        """Initializes, in place: the convolution uniform within W^-0.5, its bias 0."""
        bound = self.short.conv**-0.5
        with torch.no_grad():
            self.conv.copy_(drawn(self.conv.shape, -bound, bound, generator))
            if self.conv_bias is not None:
                nn.init.zeros_(self.conv_bias)

    def state(self, dtype: torch.dtype) -> StateSpec:
        """Returns the shape and dtype of the last inputs of the convolution [W - 1, M], in float32 or float64."""
        return StateSpec(self.short, (((self.short.conv - 1, self.width), state_dtype(dtype)),))

    def inputs(self, x: Tensor) -> list[Tensor]:
        """Returns b * u and c."""
        b, c, u = self.in_proj(x).chunk(3, -1)
        return [b * u, c]

    def mix(
        self, inputs: Sequence[Tensor], order: InOrder, past: Sequence[Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns c * conv(b * u), [B, T, M], and the last inputs of the convolution."""
        x, c = inputs
        x = order.known(x)
        tail = None if past is None else past[0].to(x.dtype)
        y = short_convolution(x, self.conv, self.conv_bias, begins=order.begins, past=tail)
        return order.known(c * y), [order.tail(x, tail, self.short.conv - 1)]
