"""Entry points of attention, where patterns, heads, scores, keys and kernels come together.

Legend: B rows, H query heads, K kv heads, T queries, S keys, D per head of q and k, Dv of v.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from headway.attention import call_cache, select
from headway.attention.backends import dense
from headway.attention.call import Call, check_axes, check_pattern, check_sink_logit, validate
from headway.attention.key_values import KeyValues
from headway.errors import PatternError
from headway.heads import Heads
from headway.partial import Partial
from headway.patterns import Full, Pattern
from headway.scores import Score, steps_of
from headway.tokens import Tokens

_FULL = Full()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern = _FULL,
    *,
    q_tokens: Tokens | None = None,
    k_tokens: Tokens | None = None,
    keep: Tensor | None = None,
    score: Score | Sequence[Score] = (),
    sink_logit: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    backend: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Returns softmax(score(scale * q k^T)) v over the keys that `pattern` allows, [B, H, T, Dv].

    Args:
        q: [B, H, T, D];  k: [B, K, S, D];  v: [B, K, S, Dv], with H a multiple of K.
        pattern: which keys each query may see.
        q_tokens, k_tokens: the tokens in the slots of each side. If both are absent, both sides are numbered from 0,
            and T must equal S unless the pattern is Full.
        keep: bool [B|1, H|1, T|1, S|1], True where a pair may be seen; restricts the pattern further (dense and sdpa
            only).
        score: steps that are applied to the scaled scores, in order.
        sink_logit: [H], one additional score for each query head, whose value is 0: the weights then sum to less than 1
            (`Partial.with_sink`). It is changed by no step of `score` and never dropped by dropout.
        scale: factor on q k^T, D ** -0.5 by default.
        dropout: probability of dropping a weight; which weights are kept depends only on `seed` and their place.
        seed: seed of dropout; drawn from torch's generator if None.
        backend: "auto", or a name in `BACKENDS`: "native", "sdpa", "banded", "dense", "diagonal", "chunks", "flex",
            "triton"; a named backend runs or fails, without a fallback.
        k_scale, v_scale: float32 [B, K, S], the scales of int8 k and v, which stand for k_scale * k and v_scale * v and
            have no gradient. "native" reads the int8 tensors; other backends get them dequantized to q's dtype.

    If the heads of a token are adjacent in the memory of q, as projections leave them, the CPU kernels return the
    result in the same layout, which is not contiguous; torch's own kernel does the same. A query that may see nothing
    gets 0 and passes no gradient. Keys that no query sees have no effect, whatever they hold.

    Raises:
        PatternError: if shapes, tokens or masks do not fit together.
        BackendError: if a named backend cannot run the call, with the reason.

    (Vaswani et al. 2017, section 3.2.1; shapes as in torch.nn.functional.scaled_dot_product_attention.)
    """
    q_tokens, k_tokens = numbered("attend", q, k, pattern, q_tokens, k_tokens)
    return attend_keys(
        q,
        q_tokens,
        [KeyValues(k, v, k_tokens, k_scale, v_scale)],
        pattern,
        keep=keep,
        score=score,
        sink_logit=sink_logit,
        scale=scale,
        dropout=dropout,
        seed=seed,
        backend=backend,
        lse=False,
    ).out


def attend_keys(
    q: Tensor,
    q_tokens: Tokens,
    keys: Sequence[KeyValues],
    pattern: Pattern,
    *,
    keep: Tensor | None = None,
    score: Score | Sequence[Score] = (),
    sink_logit: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    backend: str = "auto",
    lse: bool = True,
    first_head: int = 0,
) -> Partial:
    """Computes attention over several disjoint sets of keys, merged, with its logsumexp; `attend` wraps it.

    Returns Partial(out [B, H, T, Dv], lse [B, H, T]), differentiable in both parts. Arguments as in `attend`; S counts
    the keys of all sets. With `lse=False` only `out` is wanted: lse may then be NaN, and backends that return none may
    run. `first_head` is the number of the first query head in its layer, if these are only some of the layer's heads:
    dropout depends on it.
    """
    if sink_logit is not None:
        check_sink_logit("attend", sink_logit, q)
        options: dict[str, Any] = {
            "keep": keep,
            "score": score,
            "scale": scale,
            "dropout": dropout,
            "seed": seed,
        }
        part = attend_keys(q, q_tokens, keys, pattern, **options, backend=backend, first_head=first_head)
        return part.with_sink(sink_logit.unsqueeze(1))
    steps, key = steps_of(score), None
    if not steps and dropout == 0 and keep is None:
        key = call_cache.key(q, q_tokens, keys, pattern, scale, backend, lse)
        repeated = call_cache.known(key)
        if repeated is not None:
            return repeated(q, keys[0])
    call = validate(q, q_tokens, keys, pattern, keep, steps, scale, dropout, seed)
    if first_head:
        call = replace(call, head_ids=torch.arange(first_head, first_head + q.shape[1], device=q.device))
    if len(call.pattern.heads) == 1:
        return select.run(call, backend, lse, key)
    return by_pattern(call, lambda subcall: select.run(subcall, backend, lse))


def attention_weights(
    q: Tensor,
    k: Tensor,
    pattern: Pattern = _FULL,
    *,
    q_tokens: Tokens | None = None,
    k_tokens: Tokens | None = None,
    keep: Tensor | None = None,
    score: Score | Sequence[Score] = (),
    sink_logit: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Returns the attention weights [B, H, T, S] as a dense tensor, for inspection. A row that sees nothing is all
    0."""
    q_tokens, k_tokens = numbered("attention_weights", q, k, pattern, q_tokens, k_tokens)
    if sink_logit is not None:
        check_sink_logit("attention_weights", sink_logit, q)
    keys = [KeyValues(k, k, k_tokens)]
    call = validate(q, q_tokens, keys, pattern, keep, steps_of(score), scale, 0.0, None)
    return dense.weights(call, sink_logit)


def numbered(
    what: str, q: Tensor, k: Tensor, pattern: Pattern, q_tokens: Tokens | None, k_tokens: Tokens | None
) -> tuple[Tokens, Tokens]:
    """Returns the tokens of both sides, numbered from 0 if absent. Raises PatternError, which begins with `what`, if
    they cannot be inferred."""
    check_axes(what, q, k)
    check_pattern(what, pattern)
    if q_tokens is None and k_tokens is None and q.shape[2] != k.shape[2] and pattern != _FULL:
        raise PatternError(
            f"{what}: {q.shape[2]} queries and {k.shape[2]} keys under {pattern} have no defined alignment; give "
            f"q_tokens=Tokens.range({q.shape[2]}, start=...) and k_tokens=Tokens.range({k.shape[2]})"
        )
    if (q_tokens is None) != (k_tokens is None) and pattern != _FULL:
        raise PatternError(f"{what}: give q_tokens and k_tokens both or neither (pattern {pattern})")
    q_tokens = _from_zero(q) if q_tokens is None else q_tokens
    return q_tokens, _from_zero(k) if k_tokens is None else k_tokens


def _from_zero(t: Tensor) -> Tokens:
    """Returns tokens numbered from 0 for the slots of t."""
    if type(t) is Tensor and t.is_cpu and not torch.compiler.is_compiling():
        return _numbers(t.shape[2])
    return Tokens.range(t.shape[2], device=t.device)


@lru_cache(maxsize=4)
def _numbers(count: int) -> Tokens:
    with torch.inference_mode(False):
        return Tokens.range(count, device="cpu")


def by_pattern(call: Call, run: Callable[[Call], Partial]) -> Partial:
    """Runs the call once for each distinct pattern: heads that share a pattern run together."""
    if len(call.pattern.heads) == 1:
        return run(call)
    device, group = call.q.device, call.heads.group
    parts: list[Partial] = []
    runs = _alike(call.pattern.heads, group)
    for heads, pattern in runs:
        ids, kv = torch.tensor(heads, device=device), sorted({h // group for h in heads})
        keep = call.keep
        subcall = replace(
            call,
            q=_take(call.q, heads),
            keys=tuple(part.map(partial(_take, heads=kv)) for part in call.keys),
            pattern=pattern,
            heads=Heads.of(len(heads), len(kv)),
            score=tuple(s.select_heads(ids) for s in call.score),
            keep=keep if keep is None or keep.shape[1] == 1 else _take(keep, heads),
            head_ids=ids if call.head_ids is None else call.head_ids[ids],
        )
        parts.append(run(subcall))
    # runs of heads [0, 2] and [1]: order is [0, 2, 1], and the result of head 1 is at place inverse[1] = 2
    order = [h for heads, _ in runs for h in heads]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    out, sums = torch.cat([p.out for p in parts], 1), torch.cat([p.lse for p in parts], 1)
    return Partial(_take(out, inverse), _take(sums, inverse))


def _take(t: Tensor, heads: Sequence[int]) -> Tensor:
    """Returns these heads of t [B, H, ...], in this order: a view if they are evenly spaced, else a copy."""
    first, last = heads[0], heads[-1]
    step = heads[1] - first if len(heads) > 1 else 1
    if step > 0 and [*heads] == [*range(first, last + 1, step)]:
        return t if len(heads) == t.shape[1] else t[:, first : last + 1 : step]
    return t.index_select(1, torch.tensor(heads, device=t.device))


def _alike(patterns: Sequence[Pattern], group: int) -> list[tuple[list[int], Pattern]]:
    """Groups the heads by pattern. A run has equally many heads of each kv head that it reads, so that they stay
    grouped.

    With group 2 and patterns A A A B of 4 heads: A runs for heads [0, 1], A for [2], B for [3].
    """
    of_kv = Counter((h // group, pattern) for h, pattern in enumerate(patterns))
    runs: dict[tuple[Pattern, int], list[int]] = {}
    for h, pattern in enumerate(patterns):
        runs.setdefault((pattern, of_kv[h // group, pattern]), []).append(h)
    return [(heads, pattern) for (pattern, _), heads in runs.items()]
