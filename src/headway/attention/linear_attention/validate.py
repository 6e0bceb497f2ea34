"""Checks of the arguments of linear attention, with errors for what it cannot do.

Legend: B rows, H query heads, K kv heads, T queries, S keys, D per head, E per value.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.attention.attend import numbered
from headway.attention.call import check_sides
from headway.attention.key_values import KeyValues
from headway.attention.linear_attention.spec import TOKENS, LinearAttentionSpec
from headway.attention.linear_attention.state import LinearState
from headway.errors import PatternError
from headway.heads import Heads
from headway.patterns import Causal, Full, Pattern
from headway.positions import Rotation
from headway.scores import Score, steps_of
from headway.tokens import Tokens

NO_WEIGHTS = (
    "linear attention computes sums over the keys, never the weights of pairs, so {} cannot be applied. Of the "
    "relative positions known in 2021 only rotary ones, which rotate queries and keys, work with it (Su et al. 2021, "
    "section 3.3); later ones act on the state: decay by distance (RetNet, not supported) and the gated delta rule "
    "(headway.nn.GatedDelta); use positions=Rotary(...), or softmax attention"
)
"""Why score steps and dropout of weights are refused."""


def forbid_weights(score: Score | Sequence[Score], dropout: float) -> None:
    """Raises PatternError for score steps or dropout on weights."""
    names = ", ".join(dict.fromkeys(type(step).__name__ for step in steps_of(score)))
    if names:
        raise PatternError(f"score={names}: {NO_WEIGHTS.format(names)}")
    if dropout:
        raise PatternError(f"dropout={dropout}: {NO_WEIGHTS.format('dropout of weights')}")


def check_pattern(linear: LinearAttentionSpec, pattern: Pattern) -> None:
    """Raises PatternError for a pattern that sums cannot express."""
    if pattern not in (Full(), Causal()):
        raise PatternError(
            f"linear attention: pattern must be Full() or Causal(), got {pattern}: "
            + NO_WEIGHTS.format("a mask")
        )
    if pattern == Causal() and not linear.is_causal:
        raise PatternError(
            f'linear attention: key_feature="{TOKENS}" divides each feature by its sum over all keys, later ones too, '
            'so it cannot be Causal(); use key_feature="softmax" or "exp", or Full()'
        )


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    linear: LinearAttentionSpec,
    pattern: Pattern,
    q_tokens: Tokens | None,
    k_tokens: Tokens | None,
    rotation: Rotation | None,
) -> tuple[Heads, Tokens, Tokens]:
    """Returns the heads and the tokens of both sides (one object if they are the same). Raises PatternError if the
    arguments do not fit."""
    check_pattern(linear, pattern)
    q_tokens, k_tokens = numbered("linear attention", q, k, pattern, q_tokens, k_tokens)
    heads = check_sides("linear attention", q, q_tokens, [KeyValues(k, v, k_tokens)])
    for tokens, t, side in ((q_tokens, q, "q"), (k_tokens, k, "k")):
        if tokens.device != t.device:
            raise PatternError(
                f"linear attention: {side}_tokens are on {tokens.device}, {side} is on {t.device}; move them"
            )
    k_tokens = q_tokens if _alike(q_tokens, k_tokens) else k_tokens
    if q_tokens is not k_tokens and (pattern == Causal() or rotation is not None):
        what = "Causal()" if pattern == Causal() else "a rotation"
        raise PatternError(
            f"linear attention: under {what} queries and keys must be the same tokens, since the sums run along one "
            "sequence; pass one Tokens as q_tokens and k_tokens, and earlier keys as past=linear_state(...)"
        )
    if rotation is not None and linear.rotary == "none":
        raise PatternError(
            'linear attention: LinearAttentionSpec(rotary="none") rotates nothing; drop rotation='
        )
    return heads, q_tokens, k_tokens


def _alike(a: Tokens, b: Tokens) -> bool:
    """Returns whether both are the same tokens in the same slots."""
    if a is b or (a.start is not None and a.start == b.start and a.count == b.count):
        return True
    if a.count != b.count:
        return False
    return all(bool((x == y).all()) for x, y in ((a.index, b.index), (a.documents, b.documents)))


def check_past(past: LinearState, k: Tensor, v: Tensor) -> None:
    """Raises PatternError unless the state fits keys k [B, K, S, F] and values v, and has no gradient."""
    want = (k.shape[0], k.shape[1], k.shape[3], v.shape[3])
    if tuple(past.kv.shape) != want or past.kv.dtype != k.dtype or past.device != k.device:
        raise PatternError(
            f"linear attention: past must be of [batch, kv_heads, features, value_dim] = {list(want)} in {k.dtype} on "
            f"{k.device}, got {list(past.kv.shape)} in {past.kv.dtype} on {past.device}"
        )
    if torch.is_grad_enabled() and (past.kv.requires_grad or past.k.requires_grad):
        raise PatternError(
            "linear attention: no gradient flows through past, but its tensors require one; compute it under "
            "torch.no_grad(), or attend over the whole sequence"
        )
