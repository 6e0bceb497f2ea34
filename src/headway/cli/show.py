"""`headway show PATTERN`: draws a pattern and reports its properties."""

from pathlib import Path
from typing import Annotated, Any

from headway.cli import offered
from headway.cli._options import says
from headway.cli._shared import note, print_json
from headway.errors import ConfigError
from headway.report import table


def command(
    patterns: Annotated[list[str], says(metavar="PATTERN...")],
    *,
    tokens: Annotated[int, says(min=1, max=512)] = 32,
    global_tokens: Annotated[str, says(flag="global")] = "",
    layers: Annotated[int, says(min=1, max=128)] = 4,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Draw an attention pattern and report its properties: pairs, density, reach, cache, receptive field.

    Patterns are Full() Causal() Window.last(n) Window.around(n) Window(before, after, step) Chunk(n) Sink(n)
    GlobalKeys() GlobalQueries() Global() PerHead(a, b, ..), joined by & and |.

    patterns: a pattern such as 'Window.last(8) | (Causal() & Sink(2))'
    tokens: number of tokens in the picture
    global_tokens: indices of global tokens: 0,5
    layers: number of layers of the receptive field
    out: file for the picture
    """
    import sys

    from headway.cache import pattern_facts
    from headway.patterns import draw, parse
    from headway.tokens import Tokens

    parsed = [parse(text) for text in patterns]
    marked = Tokens.range(tokens)
    if global_tokens:
        marked = marked.with_global(_indices(global_tokens, tokens))
    reports = [pattern_facts(pattern, marked, layers) for pattern in parsed]
    if json:
        print_json(reports[0] if len(reports) == 1 else reports)
    else:
        marks = "■·" if (sys.stdout.encoding or "").lower().replace("-", "") == "utf8" else "#."
        for pattern, report in zip(parsed, reports, strict=True):
            print(f"{pattern}\n")
            print(draw(pattern, tokens, marked, marks))
            print("\n" + to_text(report) + "\n")
    if out is not None:
        offered("patterns")(out, parsed, tokens, marked)
        note(f"written: {out}")


def to_text(report: dict[str, Any]) -> str:
    """Returns the facts for a terminal."""
    count, heads = report["tokens"], report["heads"]
    reach = {side: "all" if bound is None else bound for side, bound in report["reach"].items()}
    growth = [
        (int(n), pairs, pairs / int(n) / heads, f"{pairs / int(n) ** 2 / heads:.2%}")
        for n, pairs in report["pairs_at"].items()
    ]
    per = f" in {heads} heads" if heads > 1 else ""
    cache = report["cache"]
    order = "causal: no query sees a later key" if report["causal"] else "not causal: queries see later keys"
    lines = [
        f"pairs      {report['pairs']} of {heads * count * count}{per}, density {report['density']:.1%}",
        f"order      {order}",
        f"reach      {reach['before']} before, {reach['after']} after",
        f"cache      {cache['what']}: {cache['why']}",
        *(f"           not {name}: {why}" for name, why in cache["rejected"]),
        "",
        table(("tokens", "pairs", "pairs per token", "of all pairs"), growth, indent=""),
        "",
        table(
            ("layers", "tokens that reach the last one", "first of them"),
            [(f["layers"], f["tokens"], f["first"]) for f in report["receptive_field"]],
            indent="",
        ),
    ]
    return "\n".join(lines)


def _indices(text: str, count: int) -> list[int]:
    try:
        indices = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--global {text}: give whole numbers joined by commas, such as 0,5") from None
    wrong = [index for index in indices if not 0 <= index < count]
    if wrong:
        raise ConfigError(f"--global {text}: no token {wrong[0]} among 0..{count - 1}; --tokens draws more")
    return indices
