"""`headway preview --data X --model M`: shows training examples token by token, and counts what is dropped."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from headway.cli._options import Model, Whole, says
from headway.cli._shared import note
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.text import Tokenizer

# two styles each, which alternate between tokens
TRAINED, READ, RESET = ("\033[30;42m", "\033[30;102m"), ("\033[0m", "\033[2m"), "\033[0m"


def command(
    *,
    data: str,
    model: Model | None = None,
    tokenizer: Path | None = None,
    template: str | None = None,
    stop: list[str] | None = None,
    train_on: Literal["all", "last"] = "all",
    context: Annotated[int, says(min=2)] = 512,
    too_long: Literal["drop", "drop_turns", "cut_left", "error"] = "drop",
    count: Annotated[Whole, says(short="-n")] = 3,
) -> None:
    """Show the first examples token by token, with the trained tokens marked; then count all examples.

    Trained tokens are green on a terminal. Elsewhere (and with NO_COLOR) they are in [ ], with | between other tokens.

    data: conversations or completions, as for train --task chat
    model: the model to be trained
    tokenizer: tokenizer.json or its folder
    template: alpaca, vicuna, chatml, llama2, or a Jinja file [default: the model's own]
    stop: a token that ends an answer; may be repeated
    train_on: which answers of a conversation are trained
    context: slots of a training row
    too_long: what to do with an example that is longer than a row
    count: number of examples to show
    """
    from headway.checkpoints.folder import load_folder
    from headway.data.chats import ChatRows, encode_examples
    from headway.data.record_kinds import Chat, Completion
    from headway.text import Tokenizer
    from headway.train.tasks.chat import stop_ids
    from headway.train.tasks.records import read_all

    source = tokenizer or model
    if source is None:
        raise ConfigError(
            "no tokenizer is given; give the folder of a model (--model), or a tokenizer (--tokenizer)"
        )
    tok = Tokenizer.load(source)
    tok = tok if template is None else tok.with_chat_template(template)
    ends = stop_ids(tok, stop or (), {} if model is None else load_folder(model).generation)
    read, remarks = read_all(data, (Chat, Completion))
    records: list[Any] = list(read)
    examples = encode_examples(records, tok, stop=ends, length=context, train_on=train_on, too_long=too_long)
    colored = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for ids, turns, where in examples[:count]:
        print(f"{where}: {len(ids)} tokens, {int((turns > 0).sum())} trained")
        print(marked(tok, ids.tolist(), [turn > 0 for turn in turns.tolist()], color=colored), end="\n\n")
    rows = ChatRows(examples, context)
    for line in (*remarks, *examples.report.lines()):
        note(line)
    note(f"{len(rows)} rows of {context} slots, {rows.used / (len(rows) * context):.1%} of them filled")


def marked(tokenizer: "Tokenizer", ids: Sequence[int], trained: Sequence[bool], *, color: bool) -> str:
    """Returns the text of ids, token by token, with the trained ones marked. A character of several tokens appears at
    the token that completes it."""
    stream, parts = tokenizer.stream(special=True), []
    for k, (token, is_trained) in enumerate(zip(ids, trained, strict=True)):
        text = stream.push(token)
        if color:
            parts.append(f"{(TRAINED if is_trained else READ)[k % 2]}{text}{RESET}")
        else:
            parts.append(f"[{text}]" if is_trained else f"|{text}" if k and not trained[k - 1] else text)
    return "".join([*parts, stream.flush()])
