"""`headway tokenize TOKENIZER TEXT`: the tokens of a text, with their ids and offsets."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli._shared import JsonOption, print_report
from headway.report import table


def command(
    tokenizer: Annotated[Path, typer.Argument(help="a folder with a tokenizer, or one of its files")],
    text: Annotated[str, typer.Argument(help="the text")],
    pair: Annotated[
        str | None, typer.Option("--pair", help="a second text, within the same template")
    ] = None,
    special: Annotated[
        bool, typer.Option("--special", help="the text of a special token is that token, not text")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Pieces, ids, token types and offsets of a text, within the tokenizer's own template."""
    from headway.text import Tokenizer

    read = Tokenizer.load(tokenizer)
    texts = [text] if pair is None else [text, pair]
    (found,) = read.inputs([(text, pair) if pair is not None else text], special=special)
    rows, shown = [], []
    for i, kind, place, which in zip(found.ids, found.token_types, found.offsets, found.texts, strict=True):
        start, end = place or (None, None)
        covers = None if which is None else texts[which][start:end]
        row = {"id": i, "piece": read.token(i), "type": kind, "text": which, "start": start, "end": end}
        rows.append({**row, "covers": covers})
        where = ("", "") if covers is None else (f"{start}:{end}", repr(covers))
        shown.append((str(i), row["piece"], kind, *where))
    characters = sum(map(len, texts))
    report = table(["id", "piece", "type", "place", "covers"], shown)
    print_report(
        {"tokenizer": str(tokenizer), "tokens": rows, "characters": characters},
        f"{report}\n{len(rows)} tokens, {characters} characters",
        json,
    )
