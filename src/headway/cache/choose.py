"""What is kept of a past, and why."""

from headway.choice import Choice
from headway.errors import CacheError
from headway.patterns import Or, Pattern, PerHead


def choose_cache(pattern: Pattern) -> Choice:
    """ "window" when the keys that later queries may see are bounded, so that pages behind them are released, else
    "growing"; with reasons.

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
            rejected=(("window", "it would forget keys that may still be seen"),),
        )
    kept = [f"the last {need.reach}" + (f" of a chunk of {need.chunk}" if need.chunk else "")]
    kept += [f"the first {need.sinks}"] if need.sinks else []
    kept += ["global ones"] if need.globals else []
    slots = f"{need.sinks + need.reach + 1} tokens" + (" and global ones" if need.globals else "")
    return Choice(
        "window",
        f"by {pattern} later queries see no earlier keys but {' and '.join(kept)}: {slots} are enough",
        rejected=(("growing", "it would hold keys that no later query sees"),),
    )
