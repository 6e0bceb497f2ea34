"""Which cache a pattern gets, and why."""

from __future__ import annotations

from typing import Literal

import torch

from headway.cache.base import Cache
from headway.cache.growing import GrowingCache
from headway.cache.ring import RingCache
from headway.choice import Choice
from headway.errors import CacheError
from headway.patterns import Or, Pattern, PerHead, Retention

Kind = Literal["auto", "growing", "ring"]


def choose_cache(pattern: Pattern) -> Choice:
    """ "ring" when the keys that later queries may see are bounded, else "growing"; with reasons.

    Raises CacheError for a pattern whose queries may see later tokens: its past is not settled when it is
    stored, so no cache can give the full forward's result.
    """
    need = _need(pattern)
    if need.reach is None:
        return Choice(
            "growing",
            f"by {_unbounded(pattern)} a later query may see any earlier key",
            rejected=(("ring", "it would forget keys that may still be seen"),),
        )
    kept = [f"the last {need.reach}"]
    kept += [f"the first {need.sinks}"] if need.sinks else []
    kept += ["global ones"] if need.globals else []
    slots = f"{need.sinks + need.reach + 1} slots" + (" and one per global token" if need.globals else "")
    return Choice(
        "ring",
        f"by {pattern} later queries see no earlier keys but {' and '.join(kept)}: {slots} are enough",
        rejected=(("growing", "it would hold keys that no later query sees"),),
    )


def make_cache(
    pattern: Pattern,
    *,
    batch: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    slack: int = 0,
    kind: Kind = "auto",
) -> Cache:
    """The cache that `choose_cache` names, or the `kind` that is asked for.

    Args:
        batch, kv_heads, head_dim, value_dim, dtype, device: as in `Cache`; dtype torch.int8 rounds.
        slack: tokens that can always be taken back with `trim`. (A growing cache takes back any number.)
    Raises:
        CacheError: the pattern looks ahead; kind is "ring" and no ring is large enough; an unknown kind.
    """
    if kind not in ("auto", "growing", "ring"):
        raise CacheError(f'make_cache: kind is "auto", "growing" or "ring", got {kind!r}')
    if slack < 0:
        raise CacheError(f"make_cache: slack counts tokens that may be taken back, got {slack}")
    need, choice = _need(pattern), choose_cache(pattern)
    if (choice.what if kind == "auto" else kind) == "growing":
        return GrowingCache(
            batch=batch,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=dtype,
            device=device,
        )
    if need.reach is None:
        raise CacheError(f'make_cache: kind="ring" was asked for, but {choice.why}; use kind="growing"')
    return RingCache(
        reach=need.reach,
        sinks=need.sinks,
        globals=need.globals,
        slack=slack,
        batch=batch,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        device=device,
    )


def _need(pattern: Pattern) -> Retention:
    if not pattern.is_causal:
        raise CacheError(
            f"no cache for {pattern}: its queries may see later tokens, so what a stored token has seen "
            "would change as the row grows; run it on whole rows, or restrict it: Causal() & ..."
        )
    return pattern.retention


def _unbounded(pattern: Pattern) -> str:
    """The parts of a pattern because of which nothing may be forgotten."""
    parts = pattern.parts if isinstance(pattern, Or | PerHead) else (pattern,)
    return ", ".join(dict.fromkeys(str(part) for part in parts if part.retention.reach is None))
