"""`headway tokenize TOKENIZER TEXT`: the tokens of a text, with their ids and offsets."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli._options import JsonOption
from headway.cli._shared import print_json
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
    rows = [
        {
            "id": i,
            "piece": read.token(i),
            "type": kind,
            "text": None if which is None else which,
            "start": None if place is None else place[0],
            "end": None if place is None else place[1],
            "covers": None if place is None or which is None else texts[which][slice(*place)],
        }
        for i, kind, place, which in zip(
            found.ids, found.token_types, found.offsets, found.texts, strict=True
        )
    ]
    if json:
        print_json({"tokenizer": str(tokenizer), "tokens": rows, "characters": sum(map(len, texts))})
        return
    shown = [
        (
            str(row["id"]),
            row["piece"],
            row["type"],
            "" if row["start"] is None else f"{row['start']}:{row['end']}",
            "" if row["covers"] is None else repr(row["covers"]),
        )
        for row in rows
    ]
    print(table(["id", "piece", "type", "place", "covers"], shown))
    print(f"{len(rows)} tokens, {sum(map(len, texts))} characters")
