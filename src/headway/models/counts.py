"""What a model costs, counted from its spec: parameters and operations.

Legend: M width, E columns of the embedding, L layers, H query heads, K kv heads, D per head, F width of the
feed-forward, V vocab, n tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from headway.errors import ConfigError
from headway.models.shape import Shape
from headway.nn import RotaryEmbedding
from headway.patterns import Pattern, pairs, visible
from headway.positions import Learned, PositionScheme
from headway.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class Counts(Shape):
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
                        turned[scheme] = sum(
                            p.numel() for p in RotaryEmbedding(scheme, self.head_dim).parameters()
                        )
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


@lru_cache(maxsize=512)
def _pairs(pattern: Pattern, n: int, heads: int) -> int:
    return pairs(pattern, n, heads=heads, tile=64 if n <= 32768 else 512)


@lru_cache(maxsize=512)
def _seen_by_last(pattern: Pattern, n: int, heads: int) -> tuple[int, ...]:
    """Keys that the last of n tokens sees, per query head."""
    seen = last_row(pattern, n).sum(-1).tolist()
    return tuple(seen) if len(seen) == heads else tuple(seen * heads)


def last_row(pattern: Pattern, n: int) -> torch.Tensor:
    """bool [H|1, n]: what the last of n tokens sees."""
    return visible(pattern, Tokens.range(1, start=n - 1), Tokens.range(n))[0, :, 0]
