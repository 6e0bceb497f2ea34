"""`headway fill-mask MODEL [TEXT]...`: words for masks."""

from typing import Annotated

import typer

from headway.cli._options import TextsRun, with_options
from headway.cli._shared import print_json
from headway.report import table


@with_options
def command(
    run: TextsRun,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="number of words for each mask")] = 5,
) -> None:
    """Find words for the masked places of texts ("Paris is the [MASK] of France."), with their probabilities.

    The mask is written as the model's tokenizer writes it: [MASK] in BERT's, <mask> in RoBERTa's."""
    filler = run.load("fill-mask")
    given = run.read()
    found = filler.fill_mask(given, top_k=top_k, batch_size=run.batch_size)
    if run.json:
        print_json([{"text": text, "masks": masks} for text, masks in zip(given, found, strict=True)])
        return
    for text, masks in zip(given, found, strict=True):
        print(text)
        rows = [
            (place + 1, one.text, one.piece, f"{one.probability:.4f}")
            for place, candidates in enumerate(masks)
            for one in candidates
        ]
        print(table(("mask", "word", "piece", "probability"), rows))
