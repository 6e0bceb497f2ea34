"""What surgery reports on a terminal."""

import math
from typing import TYPE_CHECKING

from headway.report import cell, size, table

if TYPE_CHECKING:
    from headway.surgery import Lengthened, Operation


def operation_text(done: "Operation") -> str:
    """The report for a terminal."""
    was, now = done.before, done.after
    lines = [f"{done.source} -> {done.target}; transformers {done.transformers}"]
    lines += [f"  {name}: {a} -> {b}" for name, a, b in done.changed] or ["  the spec stays as it was"]
    for choice in done.choices:
        rejected = [f"    not {name}: {why}" for name, why in choice.rejected]
        lines += [f"  {choice.what}: {choice.why}", *rejected]
    rows: list[tuple[object, ...]] = [
        ("parameters", was.parameters, now.parameters),
        (f"KV per token ({done.dtype})", size(was.kv_bytes_per_token), size(now.kv_bytes_per_token)),
        (f"KV of a row of {done.context}", size(was.kv_bytes_stored), size(now.kv_bytes_stored)),
    ]
    if was.loss is not None:
        names = ("nats per token", "bits per byte", "perplexity")
        losses = [(m.loss, m.bits_per_byte, m.perplexity) for m in (was, now)]
        rows += zip(names, *losses, strict=True)
    lines += ["", table(("what", "before", "after"), rows), ""]
    lines.append(
        f"  largest difference of a logit: {cell(done.difference)} (largest logit {cell(done.largest_logit)}), "
        f"in the last {done.probed} of {done.probe} tokens"
    )
    if done.positions:
        columns = ("tokens to look back on", "predictions", "perplexity before", "after")
        ranges = [(f"{p.first}-{p.last}", p.tokens, _exp(p.before), _exp(p.after)) for p in done.positions]
        lines += ["", table(columns, ranges)]
    else:
        lines.append("  no loss was measured: --data FILE gives held-out text to measure it on")
    return "\n".join(lines)


def _exp(loss: float | None) -> float | None:
    return None if loss is None else math.exp(min(loss, 700.0))


def lengthened_text(done: "Lengthened") -> str:
    """The report for a terminal."""
    lines = [f"{done.source} -> {done.target}; transformers {done.transformers}"]
    lines += [f"  {name}: {a} -> {b}" for name, a, b in done.changed]
    every, seen = done.pairs
    marks = {True: "the first", False: "none"}
    cells = [(d.tokens, marks[d.marked], d.difference, d.largest) for d in done.differences]
    sizes = [("parameters", *done.parameters), ("longest row", *done.context)]
    return "\n".join(
        [
            *lines,
            "",
            table(("what", "before", "after"), sizes),
            "",
            f"  scores of a row of {done.context[1]}: {seen}, {seen / every:.1%} of the {every} if all saw all",
            f"  rows of up to {done.unchanged} tokens see what they saw; largest difference of an output:",
            table(("tokens", "global", "difference", "largest output"), cells),
        ]
    )
