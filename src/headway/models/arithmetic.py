"""What a model holds and reads, in bytes, counted from its spec; and how far it sees.

Legend: M width, L layers, H query heads, K kv heads, D per head, F width of the feed-forward, V vocab, n tokens of a
row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from headway.cache import make_cache
from headway.errors import ConfigError
from headway.models.counts import Counts, last_row
from headway.patterns import Pattern
from headway.positions import Learned
from headway.quantization import row_bytes

Scores = Literal["recomputed", "stored"]


@dataclass(frozen=True, kw_only=True)
class Arithmetic(Counts):
    """Methods of `ModelSpec` that count bytes: of weights, of keys and values, of training; and the reach."""

    # -- weights -------------------------------------------------------------------------------------------

    def weight_bytes(self, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of all parameters."""
        return self.parameter_count * dtype.itemsize

    def weight_bytes_read(self, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> int:
        """Bytes of weights that a step of one token per row reads: everything once, but of an embedding that is
        not also the output layer only `batch` rows."""
        rows = 0 if self.tied else batch
        rows += batch if isinstance(self.positions, Learned) else 0
        table = self.parameters()["embedding"] - (self.vocab * self.width if self.tied else 0)
        return (self.parameter_count - table + rows * self.width) * dtype.itemsize

    # -- keys and values ---------------------------------------------------------------------------------

    def kv_bytes_per_token(self, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of keys and values that one token has in all layers: 2 L K (D e), with e bytes per number; in
        int8, whose rows have a float32 scale, 2 L K (D + 4)."""
        return 2 * self.layers * self.kv_heads * row_bytes(self.head_dim, dtype)

    def cache_slots(self, context: int) -> tuple[int, ...]:
        """Slots per row that each layer's cache holds after `context` tokens: all of them where it grows, at most
        its bound where it is a ring."""
        return tuple(_slots(p, context) for p in self.patterns)

    def kv_bytes_stored(self, context: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> int:
        """Bytes of keys and values that the caches of `batch` rows of `context` tokens hold.

        2 K (D e) bytes, in int8 2 K (D + 4), times the slots of each layer."""
        return 2 * self.kv_heads * row_bytes(self.head_dim, dtype) * batch * sum(self.cache_slots(context))

    def kv_bytes_read(self, context: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> int:
        """Bytes of keys and values that one more token of `batch` rows of `context` tokens reads.

        2 (D e) bytes, in int8 2 (D + 4), times the keys that the last query sees, per kv head and layer: a kv
        head is read once for its whole group, and (`PerHead`) wherever one of the group looks.
        """
        read = sum(sum(_read_by_last(p, context, self.heads, self.kv_heads)) for p in self.patterns)
        return 2 * row_bytes(self.head_dim, dtype) * batch * read

    # -- training memory -----------------------------------------------------------------------------------

    def activation_bytes(
        self,
        context: int,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        *,
        scores: Scores = "recomputed",
        gradient_checkpointing: bool = False,
    ) -> dict[str, int]:
        """What a forward pass keeps for the backward, in bytes, by cause.

        Per token, with e bytes per number (4 in float32, 2 in bfloat16):

            norms          (2 L + 1) ((4 + 2 e) M + 4)           what is normed, in float32; the result; with gain
                           + L (H + K) ((4 + e) D + 4) with qk_norm
              "layer"      (2 L + 1) (2 e M + 2 e)               input and result; mean and deviation
            attention      L (e D (2 H + 2 K) + 4 H)             q, k, v, the output, and the logsumexp
            feed-forward   L 4 e F                               gate, its activation, up, their product
              not gated    L 2 e F                               up and its activation; e F fewer with ReLU, either way
            dropout        (2 L + 1) e M                         what the embedding and the sub-layers kept;
                                                                 e M more with final_dropout
            logits         4 V                                   the log-probabilities, in float32

        (in order "joint" L norms fewer; in order "parallel" two norms of a layer keep one input; a norm behind the
        embedding keeps its input, e M + 2 e),

        and, per row of n tokens, only where `scores` are "stored" (backend "dense"):

            scores         L (8 H n^2)  + L n^2                  exp(scores) and weights, in float32; one mask
                           and q, k, v in float32 whatever e is

        With `gradient_checkpointing`, one block at a time is computed again: of L layers one counts, and the others
        keep their input, L e M per token ("inputs"). Parameters, gradients and optimizer come on top
        (`training_bytes`). The backend "banded" keeps one more copy of the output, e H D.
        """
        self._must_be_counted("activation_bytes")
        m, h, k, d, f = self.width, self.heads, self.kv_heads, self.head_dim, self.hidden
        e, n, tokens = dtype.itemsize, context, context * batch
        full = 1 if gradient_checkpointing else self.layers
        norms = full * (1 if self.order == "joint" else 2) + 1
        inputs = norms - full * (self.order == "parallel") + self.embedding_norm
        rms = norms * ((4 + 2 * e) * m + 4)
        layer = inputs * e * m + norms * e * m + (norms + self.embedding_norm) * 2 * e
        qk = (h + k) * ((4 + e) * d + 4) * self.qk_norm
        hidden = (4 if self.gated else 2) - (self.activation == "relu")
        found = {
            "norms": tokens * ((rms if self.norm == "rms" else layer) + full * qk),
            "attention": tokens
            * full
            * ((4 if scores == "stored" else e) * d * (h + 2 * k) + e * d * h + 4 * h),
            "scores": full * (8 * h * n * n * batch + n * n) if scores == "stored" else 0,
            "feed-forward": tokens * full * hidden * e * f,
            "logits": tokens * 4 * self.vocab,
        }
        if self.dropout:
            found["dropout"] = tokens * (2 * full + 1 + self.final_dropout) * e * m
        return {**found, "inputs": tokens * self.layers * e * m} if gradient_checkpointing else found

    def _must_be_counted(self, what: str) -> None:
        usual = {"final_norm": True, "causal": True, "embedding_width": None, "encoder": None,
                 "linear": None, "token_types": 0, "activation_dropout": 0.0}  # fmt: skip
        other = [
            f"{name}={getattr(self, name)!r}" for name, value in usual.items() if getattr(self, name) != value
        ]
        if self.order == "post" or (self.norm == "rms" and (self.order == "parallel" or self.embedding_norm)):
            other[:0] = [f"{name}={getattr(self, name)!r}" for name in ("order", "norm", "embedding_norm")]
        if other:
            raise ConfigError(
                f"{what} is counted for decoders whose norms stand in front of their sub-layers; this model has "
                f"{', '.join(other)}"
            )

    def training_bytes(
        self,
        context: int,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        *,
        scores: Scores = "recomputed",
        gradient_checkpointing: bool = False,
    ) -> dict[str, int]:
        """Bytes that training holds at the end of a forward pass, by cause: parameters, gradients and AdamW's
        two moments (all in `dtype`), and `activation_bytes`."""
        own = self.weight_bytes(dtype)
        held = {"parameters": own, "gradients": own, "optimizer": 2 * own}
        kept = self.activation_bytes(
            context, batch, dtype, scores=scores, gradient_checkpointing=gradient_checkpointing
        )
        return held | kept

    # -- reach ---------------------------------------------------------------------------------------------

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """(before, after): how far to either side the last layer's output at a token depends on inputs: the layers'
        reaches added; None is no bound (global tokens have none, whether or not some are marked).

        Exact for windows, their unions and `PerHead`; of windows joined by `&`, an upper bound."""
        before, after = zip(*(pattern.reach for pattern in self.patterns), strict=True)
        return _added(before), _added(after)

    def receptive_field(self) -> int | None:
        """How many positions beside its own the last layer's output at a token spans, both sides of `reach` together.

        None is no bound. (Beltagy et al. 2020, section 3.1: l layers of window w, w / 2 on either side, see l w.)"""
        before, after = self.reach
        return None if before is None or after is None else before + after


def _added(reaches: tuple[int | None, ...]) -> int | None:
    known = [n for n in reaches if n is not None]
    return sum(known) if len(known) == len(reaches) else None


@lru_cache(maxsize=512)
def _read_by_last(pattern: Pattern, n: int, heads: int, kv_heads: int) -> tuple[int, ...]:
    """Keys that the last of n tokens makes each kv head read."""
    row = last_row(pattern, n)
    if row.shape[0] == 1:
        return tuple(row.sum(-1).tolist() * kv_heads)
    return tuple(row.unflatten(0, (kv_heads, heads // kv_heads)).any(1).sum(-1).tolist())


@lru_cache(maxsize=512)
def _slots(pattern: Pattern, context: int) -> int:
    bound = make_cache(pattern, batch=1, kv_heads=1, head_dim=1).bound
    return context if bound is None else min(context, bound)
