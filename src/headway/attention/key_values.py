"""A set of keys with their values and what is known of their slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.quantization import dequantize, quantize
from headway.tokens import Tokens


@dataclass(frozen=True, eq=False)
class KeyValues:
    """k [B, K, S, D], v [B, K, S, Dv] and the S slots' `tokens`.

    Training tensors, cache contents, pages, encoder memory: all of them are KeyValues; attention over several
    disjoint KeyValues is merged. Where k and v are int8 they stand for k_scale k and v_scale v, with a scale per slot
    and kv head: float32 [B, K, S].
    """

    k: Tensor
    v: Tensor
    tokens: Tokens
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def is_int8(self) -> bool:
        return self.k_scale is not None

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """(k_scale, v_scale), or nothing."""
        return tuple(t for t in (self.k_scale, self.v_scale) if t is not None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """(k, v), and the scales where there are any."""
        return self.k, self.v, *self.scales

    def map(self, change: Callable[[Tensor], Tensor], tokens: Tokens | None = None) -> KeyValues:
        """The same with rows, heads or slots (dimensions 0 to 2) of every tensor changed alike."""
        k, v, *scales = map(change, self.tensors)
        return KeyValues(k, v, self.tokens if tokens is None else tokens, *scales)

    def slice(self, begin: int, end: int) -> KeyValues:
        """The slots begin..end-1."""
        return self.map(lambda t: t[:, :, begin:end], self.tokens.slice(begin, end))

    @staticmethod
    def cat(parts: Sequence[KeyValues]) -> KeyValues:
        """Sets of the same kind side by side, as one."""
        if len(parts) == 1:
            return parts[0]
        k, v, *scales = (torch.cat(same, 2) for same in zip(*(p.tensors for p in parts), strict=True))
        return KeyValues(k, v, Tokens.cat([p.tokens for p in parts]), *scales)

    def quantized(self) -> KeyValues:
        """The same in int8, rounded (`headway.quantization`)."""
        (k, k_scale), (v, v_scale) = quantize(self.k), quantize(self.v)
        return KeyValues(k, v, self.tokens, k_scale, v_scale)

    def dequantized(self, dtype: torch.dtype) -> KeyValues:
        """What int8 stands for, in `dtype`; itself where it is not int8."""
        if self.k_scale is None or self.v_scale is None:
            return self
        return KeyValues(
            dequantize(self.k, self.k_scale, dtype), dequantize(self.v, self.v_scale, dtype), self.tokens
        )
