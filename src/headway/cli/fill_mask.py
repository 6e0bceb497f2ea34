"""`headway fill-mask MODEL [TEXT]...`: words for masks."""

from typing import Annotated

import typer

from headway.cli._options import (
    BackendOption,
    BatchSizeOption,
    DtypeOption,
    FileOption,
    JsonOption,
    ModelArgument,
    TextsArgument,
    ThreadsOption,
)
from headway.cli._shared import print_json, read_texts, set_threads
from headway.report import table


def command(
    model: ModelArgument,
    texts: TextsArgument = None,
    file: FileOption = None,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="number of words for each mask")] = 5,
    batch_size: BatchSizeOption = 32,
    dtype: DtypeOption = None,
    json: JsonOption = False,
    threads: ThreadsOption = None,
    backend: BackendOption = "auto",
) -> None:
    """Find words for the masked places of texts ("Paris is the [MASK] of France."), with their probabilities.

    The mask is written as the model's tokenizer writes it: [MASK] in BERT's, <mask> in RoBERTa's."""
    set_threads(threads)
    from headway.api import load

    filler = load(model, task="fill-mask", dtype=dtype, backend=backend)
    given = read_texts(texts, file)
    found = filler.fill_mask(given, top_k=top_k, batch_size=batch_size)
    if json:
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
