"""`headway answer MODEL QUESTION [CONTEXT]`: the span of a text that answers a question."""

from typing import Annotated

import typer

from headway.cli._options import BatchSizeOption, JsonOption, ModelRun, with_options
from headway.cli._shared import print_json, read_prompt
from headway.report import table


@with_options
def command(
    run: ModelRun,
    question: Annotated[str, typer.Argument(metavar="QUESTION")],
    context: Annotated[
        str | None, typer.Argument(metavar="CONTEXT", help="the text; from standard input when missing")
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="number of answers")] = 1,
    longest: Annotated[int, typer.Option("--longest", min=1, help="most tokens of an answer")] = 30,
    stride: Annotated[
        int, typer.Option("--stride", min=1, help="tokens from one window of a long text to the next")
    ] = 128,
    no_answer: Annotated[
        float | None,
        typer.Option(
            "--no-answer",
            metavar="THRESHOLD",
            help="also consider that there is no answer: it precedes the answers whose scores do not exceed its "
            "own by THRESHOLD, a difference of logits (0 is even) [default: there is an answer]",
        ),
    ] = None,
    batch_size: BatchSizeOption = 32,
    json: JsonOption = False,
) -> None:
    """Find the answer to a question in a text, with its place and probability."""
    answerer = run.load("answer")
    text = read_prompt() if context is None or context == "-" else context
    found = answerer.answer(
        question,
        text,
        top_k=top_k,
        longest=longest,
        stride=stride,
        no_answer=no_answer,
        batch_size=batch_size,
    )
    if json:
        print_json({"question": question, "answers": found})
        return
    rows = [
        (f"{one.start}:{one.end}" if one.text else "-", f"{one.probability:.4f}", one.text or "no answer")
        for one in found
    ]
    print(table(("place", "probability", "answer"), rows))
