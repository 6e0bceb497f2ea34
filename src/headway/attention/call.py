"""One attention call, checked and with every default filled in: the input of every backend.

Legend: B rows, H query heads, K kv heads, G group, T queries, S keys, D per head of q and k, Dv of v.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

import torch
from torch import Tensor

from headway.attention.dropout import keep_scale
from headway.attention.key_values import KeyValues
from headway.errors import PatternError
from headway.heads import Heads
from headway.partial import work_dtype
from headway.patterns import Pattern, visible
from headway.scores import Score
from headway.tokens import Tokens


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of `attend_keys` after checking; backends get one `pattern` for all heads of a call.

    `head_ids` are the numbers of these query heads in the whole call, by which dropout is keyed.
    """

    q: Tensor
    q_tokens: Tokens
    keys: tuple[KeyValues, ...]
    pattern: Pattern
    heads: Heads
    scale: float
    score: tuple[Score, ...] = ()
    keep: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0
    head_ids: Tensor | None = None

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(p for s in self.score for p in s.parameters)

    @property
    def work_dtype(self) -> torch.dtype:
        """The dtype of scores, lse and sums: float64 for float64 inputs, else float32."""
        return work_dtype(self.q.dtype)

    @property
    def needs_grad(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        tensors = (self.q, *(t for s in self.keys for t in (s.k, s.v)), *self.parameters)
        return any(t.requires_grad for t in tensors)

    def dequantized(self) -> "Call":
        """Returns the same call with int8 keys and values dequantized to the dtype of q."""
        if not any(part.is_int8 for part in self.keys):
            return self
        return replace(self, keys=tuple(part.dequantized(self.q.dtype) for part in self.keys))

    def gathered(self) -> "Call":
        """Returns the same call with keys that are in a store gathered into contiguous tensors."""
        if all(part.slots is None for part in self.keys):
            return self
        return replace(self, keys=tuple(part.gathered() for part in self.keys))

    @property
    def slots(self) -> list[int]:
        """The global key slot at which each set begins."""
        return list(accumulate((part.tokens.count for part in self.keys[:-1]), initial=0))

    def clean_queries(self) -> Tensor:
        """Returns q with its empty slots set to 0: their weights are 0, but 0 times NaN would be NaN in the gradient
        of k."""
        if self.q_tokens.start is not None:
            return self.q
        return self.q.masked_fill(~self.q_tokens.valid[:, None, :, None], 0.0)

    def grouped(self, t: Tensor) -> Tensor:
        """Splits query heads by kv head, [B, H, T, ...] -> [B, K, G, T, ...]: query head h reads kv head h // G; no
        copy."""
        return split(t, 1, self.heads.kv_heads, self.heads.group)

    def with_parameters(self, values: Sequence[Tensor]) -> "Call":
        """Returns the same call with the tensors of its scores replaced, in the order of `parameters`."""
        remaining = iter(values)
        pairs = [(step, tuple(islice(remaining, len(step.parameters)))) for step in self.score]
        return replace(self, score=tuple(step.with_parameters(tensors) for step, tensors in pairs))

    def scored(self, s: Tensor, q: Tensor, at_q: Tokens, at_k: Tokens) -> Tensor:
        """Returns the scaled scores [B, H, T, S] after all steps of `score`."""
        for step in self.score:
            s = step.apply(s, q, at_q, at_k, self.scale)
        return s

    def dropped(self, at_q: Tensor, at_k: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the factors [B, H, t, s] of attention dropout for query slots [B|1, t] and global key slots [B|1,
        s]."""
        device = self.q.device
        ids = torch.arange(self.q.shape[1], device=device) if self.head_ids is None else self.head_ids
        rows = torch.arange(self.q.shape[0], device=device)
        return keep_scale(self.seed, self.dropout, rows, ids, at_q, at_k, dtype)

    def seen(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns (mask [B|1, H|1, T, S], unseen [B|1, K|1, S, 1]) of a key set: which keys each query sees, and
        which keys no query sees, whose contents must have no effect, even if they are NaN."""
        part, begin = self.keys[number], self.slots[number]
        mask = visible(self.pattern, self.q_tokens, part.tokens)
        if self.keep is not None:
            broadcast = self.keep.shape[-1] == 1
            mask = mask & (self.keep if broadcast else self.keep[..., begin : begin + part.tokens.count])
        is_seen = mask.any(-2)
        if is_seen.shape[1] > 1:
            is_seen = is_seen.unflatten(1, (self.heads.kv_heads, -1)).any(2)
        return mask, ~is_seen.unsqueeze(-1)


def split(t: Tensor, axis: int, outer: int, inner: int) -> Tensor:
    """Splits one axis into two: `Tensor.unflatten` with a type; always a view."""
    result: Tensor = t.unflatten(axis, (outer, inner))
    return result


def validate(
    q: Tensor,
    q_tokens: Tokens,
    keys: Sequence[KeyValues],
    pattern: Pattern,
    keep: Tensor | None,
    score: tuple[Score, ...],
    scale: float | None,
    dropout: float,
    seed: int | None,
) -> Call:
    """Returns the checked call with all defaults filled in. Raises PatternError, which says what was given and what
    is needed."""
    check_pattern("attend", pattern)
    if not keys:
        raise PatternError("attend_keys: no KeyValues are given; give at least one (it may hold no keys)")
    heads = check_sides("attend", q, q_tokens, keys)
    if q.dtype == torch.float16 and q.device.type == "cpu":
        raise PatternError(
            "attend: float16 products run hundreds of times slower than bfloat16 on a CPU; "
            "use torch.bfloat16 or torch.float32 there"
        )
    if len(pattern.heads) != 1 and len(pattern.heads) != q.shape[1]:
        raise PatternError(f"attend: PerHead names {len(pattern.heads)} heads, but q has {q.shape[1]}")
    if not 0.0 <= dropout < 1.0:
        raise PatternError(f"attend: dropout is a probability from 0 to below 1, got {dropout}")
    if keep is not None:
        _check_keep(keep, (*q.shape[:3], sum(s.count for s in keys)))
    try:
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    except (TypeError, ValueError):
        raise PatternError(f"attend: scale must be one number, got {scale!r}") from None
    if not -math.inf < scale < math.inf:
        raise PatternError(f"attend: scale must be finite, got {scale}")
    if dropout and seed is None:
        seed = int(torch.randint(2**62, ()))
    call = Call(q, q_tokens, tuple(keys), pattern, heads, scale, score, keep, dropout, seed or 0)
    if call.needs_grad and any(part.is_int8 for part in keys):
        raise PatternError(
            "attend: int8 keys and values have no backward; call it under torch.no_grad(), or dequantize them first "
            "(KeyValues.dequantized)"
        )
    return call


def check_pattern(what: str, pattern: object) -> None:
    """Raises PatternError if `pattern` is no pattern; the message says what to give instead."""
    if isinstance(pattern, Pattern):
        return
    if isinstance(pattern, type) and issubclass(pattern, Pattern):
        instead = f"the class {pattern.__name__}; give an instance, {pattern.__name__}(...)"
    elif hasattr(pattern, "shape"):
        instead = (
            f"a {type(pattern).__name__} of shape {tuple(pattern.shape)}; pass a mask as keep=mask, bool [B|1, H|1, "
            "T|1, S|1], True where a key may be seen"
        )
    elif isinstance(pattern, str):
        instead = f"a str; convert it by headway.patterns.parse({pattern!r})"
    else:
        instead = f"{pattern!r} of type {type(pattern).__name__}"
    raise PatternError(f"{what}: pattern must be a Pattern such as Causal(), got {instead}")


def check_sink_logit(what: str, logit: object, q: Tensor) -> None:
    """Raises PatternError unless `logit` has one number for each query head."""
    got = f"a {type(logit).__name__}"
    if isinstance(logit, Tensor):
        if logit.is_floating_point() and logit.shape == q.shape[1:2] and logit.device == q.device:
            return
        got = f"{logit.dtype} {list(logit.shape)} on {logit.device}"
    raise PatternError(
        f"{what}: sink_logit must be floating point [{q.shape[1]}] (one per query head) on {q.device}, got {got}"
    )


def check_axes(what: str, *tensors: Tensor) -> None:
    """Raises PatternError unless every argument is a tensor [batch, heads, slots, width]."""
    for t in tensors:
        if not isinstance(t, Tensor):
            raise PatternError(
                f"{what}: q, k and v must be torch tensors [batch, heads, slots, width], got {type(t).__name__}; "
                "convert an array by torch.as_tensor(x)"
            )
        if t.dim() != 4:
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            raise PatternError(f"{what}: q, k and v must be [batch, heads, slots, width]; got {shapes}")


def check_sides(what: str, q: Tensor, q_tokens: Tokens, keys: Sequence[KeyValues]) -> Heads:
    """Returns the heads of a call. Raises PatternError if tensors and tokens do not fit together."""
    check_axes(what, q, *(t for part in keys for t in (part.k, part.v)))
    _check_type(what, q, q, False)
    for part in keys:
        _check_scales(q, part)
        for t in (part.k, part.v):
            _check_type(what, q, t, part.is_int8)
    heads = Heads.of(q.shape[1], keys[0].k.shape[1])
    for part in keys:
        _check_shapes(what, q, part, keys[0])
    sides = ((s.tokens, s.count, "k") for s in keys)
    for tokens, count, side in ((q_tokens, q.shape[2], "q"), *sides):
        if tokens.count != count or tokens.rows not in (1, q.shape[0]):
            raise PatternError(
                f"{what}: {side}_tokens describe {tokens.rows} rows of {tokens.count} slots, but {side} holds "
                f"{q.shape[0]} rows of {count}"
            )
    return heads


def _check_type(what: str, q: Tensor, t: Tensor, int8: bool) -> None:
    if int8 and t.dtype != torch.int8:
        raise PatternError(f"{what}: k_scale and v_scale are for int8 keys and values, got {t.dtype}")
    if not (int8 or t.is_floating_point()):
        hint = "; int8 keys and values need k_scale and v_scale" if t.dtype == torch.int8 else ""
        raise PatternError(f"{what}: q, k and v must be floating point, got {t.dtype}{hint}")
    if (t.dtype != q.dtype and not int8) or t.device != q.device:
        raise PatternError(
            f"{what}: q, k and v must share dtype and device; got {q.dtype} on {q.device} "
            f"and {t.dtype} on {t.device}"
        )


def _check_shapes(what: str, q: Tensor, part: KeyValues, first: KeyValues) -> None:
    (rows, _, _, width), k, v = q.shape, part.k.shape, part.v.shape
    alike = k[1] == first.k.shape[1] and v[3] == first.v.shape[3]
    checks = (
        (k[0] != rows or v[0] != rows, "q, k and v must have the same batch size"),
        (k[1:3] != v[1:3], "k and v must have the same heads and slots"),
        (k[3] != width, "q and k must have the same width per head"),
        (not alike, "all sets of keys must have the same kv heads and value width"),
    )
    wrong = next((reason for failed, reason in checks if failed), None)
    if wrong is not None:
        raise PatternError(f"{what}: {wrong}; got q {tuple(q.shape)}, k {tuple(k)}, v {tuple(v)}")


def _check_scales(q: Tensor, part: KeyValues) -> None:
    """Raises PatternError unless there are no scales, or one tensor each for keys and values."""
    if len(part.scales) == 1:
        raise PatternError(
            "attend: give k_scale and v_scale both or neither; keys and values are both int8 or neither is"
        )
    for t in part.scales:
        if t.dtype != torch.float32 or t.shape != part.k.shape[:3] or t.device != q.device:
            raise PatternError(
                f"attend: k_scale and v_scale must be float32 {list(part.k.shape[:3])} on {q.device}, a number for "
                f"each row, kv head and slot; got {t.dtype} {list(t.shape)} on {t.device}"
            )


def _check_keep(keep: Tensor, shape: tuple[int, ...]) -> None:
    if keep.dtype != torch.bool:
        raise PatternError(
            f"attend: keep must be bool (True = may be seen), got {keep.dtype}; turn an additive mask into "
            "`mask == 0`, a 0/1 mask into `mask.bool()`"
        )
    if keep.dim() != 4 or any(n != 1 and n != m for n, m in zip(keep.shape, shape, strict=True)):
        raise PatternError(
            f"attend: keep must broadcast to [batch, heads, queries, keys] = {list(shape)}, "
            f"got {list(keep.shape)}"
        )
