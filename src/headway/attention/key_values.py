"""A set of keys with their values and the tokens in their slots."""

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

    Where the keys are some of those in a store, `slots` [1, N] says in which slot of k and v each of the N `tokens` is:
    int32, and any slot where there is no token (index -1).
    """

    k: Tensor
    v: Tensor
    tokens: Tokens
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    slots: Tensor | None = None

    @property
    def count(self) -> int:
        """Keys, S or N."""
        return self.tokens.count if self.slots is not None else self.k.shape[2]

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

    def map(self, change: Callable[[Tensor], Tensor], tokens: Tokens | None = None) -> "KeyValues":
        """The same with rows, heads or, unless they are in a store, slots (dimensions 0 to 2) of every tensor changed
        alike."""
        k, v, *scales = map(change, self.tensors)
        tokens = self.tokens if tokens is None else tokens
        k_scale, v_scale = scales or (None, None)
        return KeyValues(k, v, tokens, k_scale, v_scale, self.slots)

    def gathered(self) -> "KeyValues":
        """The keys side by side, where they are in a store; itself where they are not."""
        if self.slots is None:
            return self
        k, v, *scales = (t.index_select(2, self.slots[0]) for t in self.tensors)
        return KeyValues(k, v, self.tokens, *scales)

    def slice(self, begin: int, end: int) -> "KeyValues":
        """The slots begin..end-1."""
        kv = self.gathered()
        return kv.map(lambda t: t[:, :, begin:end], self.tokens.slice(begin, end))

    @staticmethod
    def cat(parts: "Sequence[KeyValues]") -> "KeyValues":
        """Sets of the same kind side by side, as one."""
        if len(parts) == 1:
            return parts[0]
        k, v, *scales = (torch.cat(same, 2) for same in zip(*(p.tensors for p in parts), strict=True))
        return KeyValues(k, v, Tokens.cat([p.tokens for p in parts]), *scales)

    def quantized(self) -> "KeyValues":
        """The same in int8, rounded (`headway.quantization`)."""
        (k, k_scale), (v, v_scale) = quantize(self.k), quantize(self.v)
        return KeyValues(k, v, self.tokens, k_scale, v_scale)

    def dequantized(self, dtype: torch.dtype) -> "KeyValues":
        """The numbers that int8 stands for, in `dtype`; itself where it is not int8."""
        if self.k_scale is None or self.v_scale is None:
            return self
        kv = self.gathered()
        assert kv.k_scale is not None
        assert kv.v_scale is not None
        k, v = dequantize(kv.k, kv.k_scale, dtype), dequantize(kv.v, kv.v_scale, dtype)
        return KeyValues(k, v, self.tokens)
