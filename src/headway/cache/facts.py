"""What follows from a pattern alone: what it costs, what a cache keeps, and how far layers of it see."""

from dataclasses import asdict
from typing import Any

from headway.cache.choose import choose_cache
from headway.choice import Choice
from headway.patterns import Pattern, pairs, visible
from headway.tokens import Tokens

LENGTHS = (1024, 8192, 32768)


def pattern_facts(pattern: Pattern, tokens: Tokens, layers: int) -> dict[str, Any]:
    """The properties of a pattern over these tokens, in JSON's types; the receptive field is that of up to so many
    layers."""
    none = Choice("none", "a query sees later keys, so nothing can be decoded token by token")
    cache = choose_cache(pattern) if pattern.is_causal else none
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
    """Which tokens reach the last one through 1, 2, .. layers of this pattern (any head): by the pairs
    themselves."""
    seen = visible(pattern, tokens, tokens)[0].any(0)
    at = seen.new_zeros(tokens.count)
    at[-1] = True
    rows: list[dict[str, int]] = []
    for layer in range(1, layers + 1):
        at = at | seen[at].any(0)  # the residual stream carries a token to itself
        reached = int(at.sum())
        if rows and rows[-1]["tokens"] == reached:
            break
        rows.append({"layers": layer, "tokens": reached, "first": int(at.int().argmax())})
    return rows
