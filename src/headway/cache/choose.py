"""Which cache a pattern gets, and why."""

from __future__ import annotations

from collections.abc import Callable

from headway.cache.kv_cache import KVCache
from headway.cache.policy import Growing, Ring, SlotPolicy
from headway.cache.spec import CacheSpec
from headway.choice import Choice
from headway.errors import CacheError, did_you_mean
from headway.patterns import Or, Pattern, PerHead, Retention

POLICIES: dict[str, Callable[[Retention, int], SlotPolicy]] = {
    "growing": lambda retention, slack: Growing(slack=slack),
    "ring": Ring,
}
"""Slot policies by name, each made of what a pattern retains and the slack; a new one is added here."""


def choose_cache(pattern: Pattern) -> Choice:
    """ "ring" when the keys that later queries may see are bounded, else "growing"; with reasons.

    Raises CacheError for a pattern whose queries may see later tokens: its past is not settled when it is
    stored, so no cache can give the full forward's result.
    """
    if not pattern.is_causal:
        raise CacheError(
            f"no cache for {pattern}: its queries may see later tokens, so what a stored token has seen "
            "would change as the row grows; run it on whole rows, or restrict it: Causal() & ..."
        )
    need = pattern.retention
    if need.reach is None:
        parts = pattern.parts if isinstance(pattern, Or | PerHead) else (pattern,)
        unbounded = dict.fromkeys(str(part) for part in parts if part.retention.reach is None)
        return Choice(
            "growing",
            f"by {', '.join(unbounded)} a later query may see any earlier key",
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


def slot_policy(pattern: Pattern, slack: int = 0, kind: str = "auto") -> SlotPolicy:
    """The slot policy of a layer with this pattern.

    Args:
        slack: tokens that can always be trimmed. (A growing cache can be trimmed by any number.)
        kind: a name in `POLICIES`; "auto" is what `choose_cache` names.
    Raises:
        CacheError: the pattern looks ahead; kind is "ring" and nothing may be forgotten; slack is negative; an
            unknown kind.
    """
    need, choice = pattern.retention, choose_cache(pattern)
    if kind not in ("auto", *POLICIES):
        raise CacheError(
            f"cache: kind is one of auto, {', '.join(POLICIES)}, got {kind!r}{did_you_mean(kind, POLICIES)}"
        )
    if kind == "ring" and need.reach is None:
        raise CacheError(f'cache: kind="ring" was asked for, but {choice.why}; use kind="growing"')
    return POLICIES[choice.what if kind == "auto" else kind](need, slack)


def make_cache(pattern: Pattern, spec: CacheSpec, *, slack: int = 0, kind: str = "auto") -> KVCache:
    """The cache of one layer, alone; `slack`, `kind` and errors are those of `slot_policy`."""
    return KVCache.of(slot_policy(pattern, slack, kind), spec)
