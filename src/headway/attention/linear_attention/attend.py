"""Calls of linear attention: features, positions, tokens and the form that computes them.

Legend: B rows, H query heads, K kv heads, G group, T queries, S keys, D per head, F features, E per value.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headway.attention.linear_attention.algorithms import FORMS, SIZE, Sums, products
from headway.attention.linear_attention.spec import LinearAttentionSpec, marked
from headway.attention.linear_attention.state import LinearState
from headway.attention.linear_attention.validate import check_call, check_past, forbid_weights
from headway.attention.token_order import Order, order_of
from headway.choice import Choice
from headway.errors import PatternError, check_known
from headway.partial import work_dtype
from headway.patterns import Causal, Full, Pattern
from headway.positions import Rotation
from headway.scores import Score
from headway.tokens import Tokens

_LINEAR, _FULL, _CAUSAL = LinearAttentionSpec(), Full(), Causal()


def linear_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    linear: LinearAttentionSpec = _LINEAR,
    pattern: Pattern = _FULL,
    *,
    q_tokens: Tokens | None = None,
    k_tokens: Tokens | None = None,
    rotation: Rotation | None = None,
    past: LinearState | None = None,
    form: str = "auto",
    score: Score | Sequence[Score] = (),
    dropout: float = 0.0,
) -> Tensor:
    """Returns sum_j sim(q_i, k_j) v_j / sum_j sim(q_i, k_j) over the keys that query i sees: [B, H, T, E].

    Args:
        q: [B, H, T, D];  k: [B, K, S, D];  v: [B, K, S, E], with H a multiple of K.
        linear: the similarity, and where `rotation` acts.
        pattern: Full() or Causal(). Documents never see each other, and empty slots neither see nor are seen.
        q_tokens, k_tokens: the tokens in the slots of each side, by default numbered from 0. Causal queries and keys
            are the same tokens, in any order of slots.
        rotation: turns features by position (`RotaryTable` of these tokens); it must preserve lengths for "cosine".
        past: the state of earlier keys of each row (`linear_state`), for Causal() without
            packed documents; it has no gradient.
        form: "parallel" (all products: the specification), "chunked" (linear time; memory linear in T, also with the
            backward), or "auto" (`choose_form`).
        score, dropout: raise an error, because there are no weights that these could act on.

    Computed in float32 (float64 for float64 inputs) and rounded once. A query that may see nothing gets 0 and passes no
    gradient. Keys that no query sees have no effect.

    Raises:
        PatternError: for another pattern, scores or dropout, and if shapes, tokens, rotation or past do not fit.
        BackendError: for second derivatives of causal "chunked".

    (Katharopoulos et al. 2020; Su et al. 2021, section 3.3, for the rotation.)
    """
    forbid_weights(score, dropout)
    return prepare(q, k, v, linear, pattern, q_tokens, k_tokens, rotation).attend(past, form)


def linear_state(
    k: Tensor,
    v: Tensor,
    linear: LinearAttentionSpec = _LINEAR,
    *,
    tokens: Tokens | None = None,
    rotation: Rotation | None = None,
) -> LinearState:
    """Returns the sums over keys [B, K, S, D] and values [B, K, S, E], one document per row. Arguments as in
    `linear_attend`; raises PatternError for packed documents."""
    return prepare(k, k, v, linear, _CAUSAL, tokens, tokens, rotation).state()


def linear_weights(
    q: Tensor,
    k: Tensor,
    linear: LinearAttentionSpec = _LINEAR,
    pattern: Pattern = _FULL,
    *,
    q_tokens: Tokens | None = None,
    k_tokens: Tokens | None = None,
    rotation: Rotation | None = None,
) -> Tensor:
    """Returns the factor of each value, [B, H, T, S]: quadratic, for inspection. Rows are distributions if
    `linear.is_distribution` or if there is no rotation; otherwise they may be negative and sum to anything."""
    call = prepare(q, k, k, linear, pattern, q_tokens, k_tokens, rotation)
    with exactly(q):
        weights, den = products(call.sums(None))
    return call.k_order.restore(call.divided(weights, den).mT).mT


def check_form(form: str) -> None:
    """Raises PatternError for an unknown form."""
    check_known(form, ("auto", *FORMS), "linear attention: there is no form", error=PatternError)


def choose_form(
    pattern: Pattern, queries: int, keys: int, features: int, value_dim: int, group: int = 1
) -> Choice:
    """Returns the form that "auto" takes, the one with fewer floating-point operations for one kv head:

        parallel    2 G T S (F + E)
        chunked     2 G T C (F + E) + 2 (G T + S) F E      causal: products in blocks, and the sums
                    2 (G T + S) F E                        bidirectional: one sum, read by all

    with C = `algorithms.SIZE`.
    """
    t, s, f, e = queries, keys, features, value_dim
    sums = 2.0 * f * e * (group * t + s)
    quadratic = 2.0 * group * t * s * (f + e)
    inside = 2.0 * group * t * min(SIZE, t) * (f + e) if pattern == _CAUSAL else 0.0
    if quadratic <= inside + sums:
        why = f"{t} queries and {s} keys are fewer products than sums of {f} x {e}"
        return Choice("parallel", why, flops=quadratic)
    return Choice(
        "chunked",
        "time and memory linear in the length",
        flops=inside + sums,
        rejected=(("parallel", f"{quadratic / (inside + sums):.1f} times as many products"),),
    )


@dataclass(frozen=True, eq=False)
class Prepared:
    """A call whose features are computed, with its slots in order.

    given       the terms of the sums, without a past
    keys        the tokens of the keys
    guarded     whether the denominator is at least `linear.eps`
    dtype       dtype of the result
    """

    linear: LinearAttentionSpec
    given: Sums
    keys: Tokens
    q_order: Order
    k_order: Order
    guarded: bool
    dtype: torch.dtype

    def attend(self, past: LinearState | None = None, form: str = "auto") -> Tensor:
        """Returns the result [B, H, T, E]; `past` and `form` as in `linear_attend`."""
        at = self.given
        check_form(form)
        if form == "auto":
            pattern, (t, features) = _CAUSAL if at.causal else _FULL, at.q.shape[3:]
            form = choose_form(pattern, t, at.k.shape[2], features, at.v.shape[3], at.q.shape[2]).what
        with exactly(at.q):
            out = self.divided(*FORMS[form](self.sums(past)))
        return out.to(self.dtype)

    def sums(self, past: LinearState | None) -> Sums:
        """Returns the input of a form: the terms of the sums, with the past."""
        at = self.given
        if past is None:
            return at
        if not at.causal or self.k_order.documents is not None:
            what = "Full()" if not at.causal else "packed documents"
            raise PatternError(f"linear attention: past needs Causal() and one document per row, got {what}")
        check_past(past, at.k, at.v)
        return replace(at, past=past)

    def state(self) -> LinearState:
        """Returns the sums over all keys, one document per row."""
        at = self.given
        if self.k_order.documents is not None:
            raise PatternError(
                "linear attention: a state needs one document per row, but these tokens are packed; give each document "
                "its own row: Tokens.from_lengths instead of Tokens.packed"
            )
        if not self.linear.is_causal:
            raise PatternError(
                'linear attention: key_feature="softmax over tokens" has no state, since it divides by a sum over all '
                'keys; use key_feature="softmax" or "exp"'
            )
        count = self.keys.valid.sum(1).expand(at.k.shape[0])
        with exactly(at.k):
            return LinearState(at.k.mT @ at.v, at.zk.sum(2), count)

    def divided(self, num: Tensor, den: Tensor) -> Tensor:
        """Returns num / den as heads [B, H, T, E], with slots in the order of the row and 0 in empty ones."""
        valid = self.q_order.valid
        if self.guarded:
            den = den.clamp_min(self.linear.eps)
        num, den = (self.q_order.restore(t.flatten(1, 2)) for t in (num, den))
        if valid is not None:
            den = torch.where(valid[:, None], den, 1.0)
        return self.q_order.zeroed(num / den.unsqueeze(-1))


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    linear: LinearAttentionSpec,
    pattern: Pattern,
    q_tokens: Tokens | None,
    k_tokens: Tokens | None,
    rotation: Rotation | None,
) -> Prepared:
    """Checks a call and computes its features."""
    causal = pattern == _CAUSAL
    heads, q_tokens, k_tokens = check_call(q, k, v, linear, pattern, q_tokens, k_tokens, rotation)
    alone = q_tokens is k_tokens
    q_order = order_of(q_tokens, alone=alone)
    k_order = q_order if alone else order_of(k_tokens, alone=False)
    if (q_order.documents is None) != (k_order.documents is None):
        q_order, k_order = (
            o if o.documents is not None else replace(o, documents=torch.zeros_like(t.index))
            for o, t in ((q_order, q_tokens), (k_order, k_tokens))
        )
    work = work_dtype(q.dtype)
    q_in, k_in, v_in = (order.zeroed(t.to(work)) for t, order in ((q, q_order), (k, k_order), (v, k_order)))
    assert linear.key_feature is not None
    assert linear.rotary is not None
    with exactly(q_in):
        of_q = marked(q_in, linear.feature, linear.rotary, rotation, q_tokens)
        of_k = marked(k_in, linear.key_feature, linear.rotary, rotation, k_tokens)
        fq, zq = _once(q_order.arrange, *of_q)
        fk, zk = _once(lambda t: k_order.arrange(k_order.zeroed(t)), *of_k)
    fq, zq = (f.unflatten(1, (heads.kv_heads, heads.group)) for f in (fq, zq))
    documents = q_order.documents, k_order.documents
    sums = Sums(fq, fk, k_order.arrange(v_in), zq, zk, *documents, None, causal)
    guarded = linear.is_safe or rotation is None
    return Prepared(linear, sums, k_tokens, q_order, k_order, guarded, q.dtype)


def exactly(t: Tensor) -> AbstractContextManager[Any]:
    """Returns a context without autocast: the sums over all keys grow, and the 8 bits of bf16 do not hold them."""
    return nullcontext() if t.is_meta else torch.autocast(t.device.type, enabled=False)


def _once(change: Callable[[Tensor], Tensor], a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Applies `change` to both tensors, only once if they are the same tensor."""
    changed = change(a)
    return changed, changed if b is a else change(b)
