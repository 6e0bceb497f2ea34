"""A set of keys with their values and the tokens in their slots."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.quantization import dequantize, quantize
from headway.tokens import Tokens


@dataclass(frozen=True, eq=False)
class KeyValues:
    """Keys k [B, K, S, D] and values v [B, K, S, Dv], with the `tokens` of their S slots.

    Training tensors, cache contents, pages and encoder memory are all KeyValues; attention over several disjoint
    KeyValues is merged. If k and v are int8, they stand for k_scale * k and v_scale * v, with one scale for each slot
    and kv head: float32 [B, K, S].

    If the keys are a selection from a store, `slots` [1, N], int32, has the slot of k and v of each of the N `tokens`;
    an empty place (index -1) has any valid slot.
    """

    k: Tensor
    v: Tensor
    tokens: Tokens
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    slots: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of keys: S, or N in a store."""
        return self.tokens.count if self.slots is not None else self.k.shape[2]

    @property
    def is_int8(self) -> bool:
        return self.k_scale is not None

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """(k_scale, v_scale), or nothing if absent."""
        return tuple(t for t in (self.k_scale, self.v_scale) if t is not None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """(k, v), followed by the scales, if there are any."""
        return self.k, self.v, *self.scales

    def map(self, change: Callable[[Tensor], Tensor], tokens: Tokens | None = None) -> "KeyValues":
        """Applies `change` to every tensor, which may change rows, heads or, unless they are in a store, slots
        (dimensions 0 to 2) of all tensors alike."""
        k, v, *scales = map(change, self.tensors)
        tokens = self.tokens if tokens is None else tokens
        k_scale, v_scale = scales or (None, None)
        return KeyValues(k, v, tokens, k_scale, v_scale, self.slots)

    def gathered(self) -> "KeyValues":
        """Returns the keys gathered from their store, or self if they are in none."""
        if self.slots is None:
            return self
        k, v, *scales = (t.index_select(2, self.slots[0]) for t in self.tensors)
        return KeyValues(k, v, self.tokens, *scales)

    def slice(self, begin: int, end: int) -> "KeyValues":
        """Returns the slots begin..end-1."""
        kv = self.gathered()
        return kv.map(lambda t: t[:, :, begin:end], self.tokens.slice(begin, end))

    @staticmethod
    def cat(parts: "Sequence[KeyValues]") -> "KeyValues":
        """Concatenates sets of the same kind along their slots."""
        if len(parts) == 1:
            return parts[0]
        gathered = [part.gathered().tensors for part in parts]
        k, v, *scales = (torch.cat(same, 2) for same in zip(*gathered, strict=True))
        return KeyValues(k, v, Tokens.cat([p.tokens for p in parts]), *scales)

    def quantized(self) -> "KeyValues":
        """Returns the same keys and values rounded to int8 (`headway.quantization`)."""
        kv = self.gathered()
        (k, k_scale), (v, v_scale) = quantize(kv.k), quantize(kv.v)
        return KeyValues(k, v, self.tokens, k_scale, v_scale)

    def dequantized(self, dtype: torch.dtype) -> "KeyValues":
        """Returns keys and values dequantized to `dtype`, or self if they are not int8."""
        if self.k_scale is None or self.v_scale is None:
            return self
        kv = self.gathered()
        assert kv.k_scale is not None
        assert kv.v_scale is not None
        k, v = dequantize(kv.k, kv.k_scale, dtype), dequantize(kv.v, kv.v_scale, dtype)
        return KeyValues(k, v, self.tokens)
