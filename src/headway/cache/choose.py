"""Which past keys a cache keeps for a pattern, and why; and what else follows from a pattern alone: its cost, and the
receptive field of layers that use it."""

from dataclasses import asdict
from typing import Any

from headway.choice import Choice
from headway.errors import CacheError
from headway.patterns import Or, Pattern, PerHead, pairs, visible
from headway.tokens import Tokens

LENGTHS = (1024, 8192, 32768)


def choose_cache(pattern: Pattern) -> Choice:
    """Returns "window" if the keys that later queries may attend to are bounded, so that pages behind them are
    released, else "growing"; with reasons.

    Raises CacheError for a pattern that is not causal: what a stored token attends to would change as the sequence
    grows, so that no cache could give the full forward's result.
    """
    if not pattern.is_causal:
        raise CacheError(
            f"no cache for {pattern}: its queries may see later tokens, so what a stored token has seen "
            "would change as the row grows; run it on whole rows, or restrict it: Causal() & ..."
        )
    retention = pattern.retention
    if retention.reach is None:
        parts = pattern.parts if isinstance(pattern, Or | PerHead) else (pattern,)
        unbounded = dict.fromkeys(str(part) for part in parts if part.retention.reach is None)
        return Choice(
            "growing",
            f"by {', '.join(unbounded)} a later query may see any earlier key",
            rejected=(("window", "it would forget keys that may still be seen"),),
        )
    keys = [f"the last {retention.reach}" + (f" of a chunk of {retention.chunk}" if retention.chunk else "")]
    keys += [f"the first {retention.sinks}"] if retention.sinks else []
    keys += ["global ones"] if retention.globals else []
    count = f"{retention.sinks + retention.reach + 1} tokens" + (
        " and global ones" if retention.globals else ""
    )
    return Choice(
        "window",
        f"by {pattern} later queries see no earlier keys but {' and '.join(keys)}: {count} are enough",
        rejected=(("growing", "it would hold keys that no later query sees"),),
    )


def pattern_facts(pattern: Pattern, tokens: Tokens, layers: int) -> dict[str, Any]:
    """Returns the properties of a pattern over these tokens, in JSON's types; the receptive field is that of up to
    `layers` layers."""
    no_cache = Choice("none", "a query sees later keys, so nothing can be decoded token by token")
    cache = choose_cache(pattern) if pattern.is_causal else no_cache
    count, heads = tokens.count, len(pattern.heads)
    allowed = pairs(pattern, count, tokens=tokens)
    before, after = pattern.reach
    return {
        "pattern": str(pattern),
        "tokens": count,
        "heads": heads,
        "pairs": allowed,
        "density": allowed / (heads * count * count),
        "causal": pattern.is_causal,
        "reach": {"before": before, "after": after},
        "retention": asdict(pattern.retention),
        "cache": {"what": cache.what, "why": cache.why, "rejected": cache.rejected},
        "pairs_at": {str(n): pairs(pattern, n) for n in LENGTHS},
        "receptive_field": _field(pattern, tokens, layers),
    }


def _field(pattern: Pattern, tokens: Tokens, layers: int) -> list[dict[str, int]]:
    """Returns how many tokens reach the last token through 1, 2, .. layers of this pattern (in any head), by its token
    pairs.

    Stops when a further layer adds none."""
    attended = visible(pattern, tokens, tokens)[0].any(0)
    reached = attended.new_zeros(tokens.count)
    reached[-1] = True
    rows: list[dict[str, int]] = []
    for layer in range(1, layers + 1):
        reached = reached | attended[reached].any(0)  # the residual stream carries a token to itself
        count = int(reached.sum())
        if rows and rows[-1]["tokens"] == count:
            break
        rows.append({"layers": layer, "tokens": count, "first": int(reached.int().argmax())})
    return rows
