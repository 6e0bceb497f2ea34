"""Attention calls: the one place where patterns, heads, scores, keys and kernels meet.

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
    """softmax(score(scale * q k^T), over the keys that `pattern` allows) v.  [B, H, T, Dv]

    Args:
        q: [B, H, T, D];  k: [B, K, S, D];  v: [B, K, S, Dv], with H a multiple of K.
        pattern: which keys each query may see.
        q_tokens, k_tokens: the tokens in the slots of either side. Without them both sides are numbered
            from 0, and T must equal S unless the pattern is Full.
        keep: bool [B|1, H|1, T, S], True where a pair may be seen, besides the pattern (dense and sdpa only).
        score: steps applied to the scaled scores in order.
        sink_logit: [H], one more score of each query head, whose value is 0: weights sum up to less than 1
            (`Partial.with_sink`). No step of `score` changes it, and no dropout drops it.
        scale: D ** -0.5 unless given.
        dropout: probability with which a weight is dropped; keep bits depend on `seed` and the place only.
        seed: for dropout; drawn from torch's generator when not given.
        backend: "auto", or a name of `BACKENDS`: "native", "sdpa", "banded", "dense", "diagonal", "chunks", "flex",
            "triton"; a named one runs or fails.
        k_scale, v_scale: of k and v that are int8, float32 [B, K, S]: they stand for k_scale k and v_scale v, and
            have no gradient. "native" reads them as they are, others the numbers that they stand for, in q's dtype.

    Where the heads of a token lie side by side in q, the CPU's kernels leave them so in the result, which is then not
    contiguous, as torch's own. A query that may see nothing gives 0 and passes no gradient. What no query sees
    does not matter.

    Raises:
        PatternError: shapes, tokens or masks that do not fit together.
        BackendError: a named backend that cannot run the call, with the reason.

    (Vaswani et al. 2017, section 3.2.1; shapes as torch.nn.functional.scaled_dot_product_attention.)
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
    """Attention over several disjoint sets of keys, merged, with its logsumexp; `attend` wraps it.

    Returns Partial(out [B, H, T, Dv], lse [B, H, T]), differentiable in both parts. Arguments as in `attend`; S counts
    the keys of all sets. `lse=False`: only `out` is wanted; lse may then be NaN, and backends that return none may run.
    `first_head` is the number of the first query head, where these are some of a layer's: dropout depends on it.
    """
    if sink_logit is not None:
        check_sink_logit("attend", sink_logit, q)
        how: dict[str, Any] = {"keep": keep, "score": score, "scale": scale, "dropout": dropout, "seed": seed}
        part = attend_keys(q, q_tokens, keys, pattern, **how, backend=backend, first_head=first_head)
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
    return by_pattern(call, lambda some: select.run(some, backend, lse))


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
    """The weights themselves, [B, H, T, S]: dense, for looking. A row that sees nothing is all 0."""
    q_tokens, k_tokens = numbered("attend", q, k, pattern, q_tokens, k_tokens)
    if sink_logit is not None:
        check_sink_logit("attention_weights", sink_logit, q)
    keys = [KeyValues(k, k, k_tokens)]
    call = validate(q, q_tokens, keys, pattern, keep, steps_of(score), scale, 0.0, None)
    return dense.weights(call, sink_logit)


def numbered(
    what: str, q: Tensor, k: Tensor, pattern: Pattern, q_tokens: Tokens | None, k_tokens: Tokens | None
) -> tuple[Tokens, Tokens]:
    """Tokens numbered from 0 on both sides where none are given to `what`."""
    check_axes(what, q, k)
    check_pattern(what, pattern)
    if q_tokens is None and k_tokens is None and q.shape[2] != k.shape[2] and pattern != _FULL:
        raise PatternError(
            f"{what}: {q.shape[2]} queries and {k.shape[2]} keys under {pattern}: say which tokens they are "
            f"(q_tokens=Tokens.range({q.shape[2]}, start=...), k_tokens=Tokens.range({k.shape[2]}))"
        )
    if (q_tokens is None) != (k_tokens is None) and pattern != _FULL:
        raise PatternError(f"{what}: give q_tokens and k_tokens both or neither (pattern {pattern})")
    q_tokens = _from_zero(q) if q_tokens is None else q_tokens
    return q_tokens, _from_zero(k) if k_tokens is None else k_tokens


def _from_zero(t: Tensor) -> Tokens:
    """The slots of t, numbered."""
    if type(t) is Tensor and t.is_cpu and not torch.compiler.is_compiling():
        return _numbers(t.shape[2])
    return Tokens.range(t.shape[2], device=t.device)


@lru_cache(maxsize=4)
def _numbers(count: int) -> Tokens:
    with torch.inference_mode(False):
        return Tokens.range(count, device="cpu")


def by_pattern(call: Call, run: Callable[[Call], Partial]) -> Partial:
    """Runs the call once per distinct pattern: heads that share a pattern run together."""
    if len(call.pattern.heads) == 1:
        return run(call)
    device, group = call.q.device, call.heads.group
    parts: list[Partial] = []
    runs = _alike(call.pattern.heads, group)
    for heads, pattern in runs:
        ids, kv = torch.tensor(heads, device=device), sorted({h // group for h in heads})
        keep = call.keep
        some = replace(
            call,
            q=_take(call.q, heads),
            keys=tuple(part.map(partial(_take, heads=kv)) for part in call.keys),
            pattern=pattern,
            heads=Heads.of(len(heads), len(kv)),
            score=tuple(s.select_heads(ids) for s in call.score),
            keep=keep if keep is None or keep.shape[1] == 1 else _take(keep, heads),
            head_ids=ids if call.head_ids is None else call.head_ids[ids],
        )
        parts.append(run(some))
    order = [h for heads, _ in runs for h in heads]
    back = sorted(range(len(order)), key=order.__getitem__)
    out, sums = torch.cat([p.out for p in parts], 1), torch.cat([p.lse for p in parts], 1)
    return Partial(_take(out, back), _take(sums, back))


def _take(t: Tensor, heads: Sequence[int]) -> Tensor:
    """These heads of t [B, H, ...], in this order: a view where they lie a regular step apart, else a copy."""
    first, last = heads[0], heads[-1]
    step = heads[1] - first if len(heads) > 1 else 1
    if step > 0 and [*heads] == [*range(first, last + 1, step)]:
        return t if len(heads) == t.shape[1] else t[:, first : last + 1 : step]
    return t.index_select(1, torch.tensor(heads, device=t.device))


def _alike(patterns: Sequence[Pattern], group: int) -> list[tuple[list[int], Pattern]]:
    """Heads by pattern; heads of one run take equally many of each kv head, so that they stay grouped.

    With group 2 and patterns A A A B of 4 heads: A runs for heads [0, 1], A for [2], B for [3].
    """
    of_kv = Counter((h // group, pattern) for h, pattern in enumerate(patterns))
    runs: dict[tuple[Pattern, int], list[int]] = {}
    for h, pattern in enumerate(patterns):
        runs.setdefault((pattern, of_kv[h // group, pattern]), []).append(h)
    return [(heads, pattern) for (pattern, _), heads in runs.items()]
