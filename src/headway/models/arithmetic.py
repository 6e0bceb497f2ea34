"""What a model costs, counted from its spec: parameters, operations, bytes.

Legend: M width, L layers, H query heads, K kv heads, G = H / K, D per head, F width of the feed-forward, V vocab,
n tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from headway.attention.int8 import row_bytes
from headway.cache import make_cache
from headway.errors import ConfigError
from headway.models.shape import Shape
from headway.nn import Turns
from headway.patterns import Pattern, pairs, visible
from headway.positions import Learned, PositionScheme
from headway.tokens import Tokens

Scores = Literal["recomputed", "stored"]


@dataclass(frozen=True, kw_only=True)
class Arithmetic(Shape):
    """Counting methods of `ModelSpec`.

    A multiply-add is 2 operations, and only matrix products are counted: norms, activations, softmax and
    rotations are of a lower order. What a pattern allows is counted pair by pair, not asserted.
    """

    # -- parameters ------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, int]:
        """Numbers in the weights, by where they are; their sum is `parameter_count`.

            embedding      V E  (and the tables of `Learned` and of token types, and E M + M where E is not M)
            attention      L (M D (H + K + K) + H D M)      plus biases; q, k and v twice with
                           `global_projections`; all of it twice in the decoder of an encoder-decoder
            feed-forward   L 3 M F, or 2 M F not gated      plus biases
            norms          (2 L + 1) M                      plus 2 L D with qk_norm; L M fewer in order "joint", L M
                           more beside an encoder; M fewer without final_norm, E more with embedding_norm; twice
                           with norm_bias
            positions      trained angles and tables of scores
            output layer   V E, or 0 when tied              plus biases, and what else the head has
            encoder        all of the encoder's, without a shared embedding

        E is M unless `embedding_width` says otherwise. Patterns have none.
        """
        m, h, k, d, f, e = self.width, self.heads, self.kv_heads, self.head_dim, self.hidden, self.columns
        table = self.positions.rows if isinstance(self.positions, Learned) else 0
        qkv = (m + self.qkv_bias) * d * (h + 2 * k)
        attention = qkv * (1 + self.global_projections) + h * d * m + m * self.out_bias
        cross = self.encoder is not None
        forward = (2 + self.gated) * m * f + ((1 + self.gated) * f + m) * self.mlp_bias
        per_norm = 1 + self.norm_bias
        norms = m * (self.layers * (2 - (self.order == "joint") + cross) + self.final_norm)
        norms += e * self.embedding_norm
        found = {
            "embedding": (self.vocab + table + self.token_types) * e + (e * m + m) * (e != m),
            "attention": self.layers * (attention + cross * (qkv + h * d * m + m * self.out_bias)),
            "feed-forward": self.layers * forward,
            "norms": norms * per_norm + 2 * self.layers * d * self.qk_norm * (1 + cross),
            "positions": self._position_parameters(),
            "output layer": self._head_parameters(),
        }
        if self.encoder is not None:
            shared = self.encoder.vocab * self.encoder.columns if self.shared_embedding else 0
            found["encoder"] = self.encoder.parameter_count - shared
        return {name: n for name, n in found.items() if n or name not in ("positions", "encoder")}

    def _head_parameters(self) -> int:
        head, m, e = self.head, self.width, self.columns
        if head.task == "lm":
            return self.vocab * (m * (not self.tied) + self.output_bias)
        if head.task == "masked-lm":
            inner = e if head.dense is not None else m
            dense = (m * e + e + e * (1 + self.norm_bias)) if head.dense is not None else 0
            return dense + self.vocab * (inner * (not self.tied) + self.output_bias)
        return (m * m + m) * (head.dense is not None) + (m + 1) * head.outputs

    def _position_parameters(self) -> int:
        turned: dict[PositionScheme, int] = {}
        with torch.device("meta"):
            total = 0
            for i, scheme in enumerate(self.layer_positions):
                if scheme.marks == "scores" and (i == 0 or not scheme.shared):
                    steps = scheme.scores(self.heads, self.head_dim, not self.causal)
                    total += sum(
                        t.numel() for s in steps for t in s.parameters if isinstance(t, torch.nn.Parameter)
                    )
                elif scheme.marks == "queries and keys":
                    if scheme not in turned:
                        turned[scheme] = sum(p.numel() for p in Turns(scheme, self.head_dim).parameters())
                    total += turned[scheme]
        return total

    @property
    def parameter_count(self) -> int:
        """All trained numbers; a tied output layer counts once."""
        return sum(self.parameters().values())

    @property
    def matrix_weights(self) -> int:
        """Weights that every token is multiplied with in the blocks: L (M D (2 H + 2 K) + 3 M F), 2 M F not gated.

        Raises ConfigError for an encoder-decoder, whose two sides have tokens of their own."""
        if self.encoder is not None:
            raise ConfigError(
                "operations and bytes are counted for one stack; ask for those of spec.encoder and of "
                "replace(spec, encoder=None, shared_embedding=False)"
            )
        m, d = self.width, self.head_dim
        return self.layers * (
            m * d * (2 * self.heads + 2 * self.kv_heads) + (2 + self.gated) * m * self.hidden
        )

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

    # -- operations --------------------------------------------------------------------------------------

    def attention_pairs(self, n: int) -> int:
        """(query, key) pairs that all heads of all layers score in a row of n tokens, counted."""
        return sum(_pairs(p, n, self.heads) for p in self.patterns)

    def prefill_flops(self, n: int, logits: int = 1) -> float:
        """Operations of a forward pass over a row of n tokens.

            2 n W  +  4 D (pairs of all heads and layers)  +  2 M V logits

        with W = `matrix_weights`; the pairs cost 2 D for the score and 2 D for the value.

        Args:
            n: tokens.
            logits: slots whose logits are computed: 1 before decoding, n in training.
        """
        products = 2.0 * n * self.matrix_weights
        return (
            products + 4.0 * self.head_dim * self.attention_pairs(n) + 2.0 * self.width * self.vocab * logits
        )

    def train_flops(self, context: int) -> float:
        """Operations per trained token in rows of `context` tokens: 3 prefill_flops(context, context) / context.

        The backward of a product is two products. What is computed a second time (checkpointed blocks, scores
        that are not stored) is not counted: this is the model's work, whoever does it.
        """
        return 3.0 * self.prefill_flops(context, logits=context) / context

    def decode_flops(self, context: int) -> float:
        """Operations for one more token of a row that then has `context` tokens.

        2 (W + M V)  +  4 D (keys that the last query sees, over all heads and layers)
        """
        seen = sum(sum(_seen_by_last(p, context, self.heads)) for p in self.patterns)
        return 2.0 * (self.matrix_weights + self.width * self.vocab) + 4.0 * self.head_dim * seen

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
        checkpoint_blocks: bool = False,
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

        With `checkpoint_blocks`, one block at a time is computed again: of L layers one counts, and the others
        keep their input, L e M per token ("inputs"). Parameters, gradients and optimizer come on top
        (`training_bytes`). The backend "banded" keeps one more copy of the output, e H D.
        """
        self._must_be_counted("activation_bytes")
        m, h, k, d, f = self.width, self.heads, self.kv_heads, self.head_dim, self.hidden
        e, n, tokens = dtype.itemsize, context, context * batch
        full = 1 if checkpoint_blocks else self.layers
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
        return {**found, "inputs": tokens * self.layers * e * m} if checkpoint_blocks else found

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
        checkpoint_blocks: bool = False,
    ) -> dict[str, int]:
        """Bytes that training holds at the end of a forward pass, by cause: parameters, gradients and AdamW's
        two moments (all in `dtype`), and `activation_bytes`."""
        own = self.weight_bytes(dtype)
        held = {"parameters": own, "gradients": own, "optimizer": 2 * own}
        kept = self.activation_bytes(
            context, batch, dtype, scores=scores, checkpoint_blocks=checkpoint_blocks
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
def _pairs(pattern: Pattern, n: int, heads: int) -> int:
    return pairs(pattern, n, heads=heads, tile=64 if n <= 32768 else 512)


@lru_cache(maxsize=512)
def _seen_by_last(pattern: Pattern, n: int, heads: int) -> tuple[int, ...]:
    """Keys that the last of n tokens sees, per query head."""
    seen = _last_row(pattern, n).sum(-1).tolist()
    return tuple(seen) if len(seen) == heads else tuple(seen * heads)


@lru_cache(maxsize=512)
def _read_by_last(pattern: Pattern, n: int, heads: int, kv_heads: int) -> tuple[int, ...]:
    """Keys that the last of n tokens makes each kv head read."""
    row = _last_row(pattern, n)
    if row.shape[0] == 1:
        return tuple(row.sum(-1).tolist() * kv_heads)
    return tuple(row.unflatten(0, (kv_heads, heads // kv_heads)).any(1).sum(-1).tolist())


def _last_row(pattern: Pattern, n: int) -> torch.Tensor:
    """bool [H|1, n]: what the last of n tokens sees."""
    return visible(pattern, Tokens.range(1, start=n - 1), Tokens.range(n))[0, :, 0]


@lru_cache(maxsize=512)
def _slots(pattern: Pattern, context: int) -> int:
    bound = make_cache(pattern, batch=1, kv_heads=1, head_dim=1).bound
    return context if bound is None else min(context, bound)
