"""`headway chat MODEL`: a conversation in the terminal, or line by line through a pipe."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli._shared import note, read_stdin, with_options
from headway.cli.generate import SamplingRun, sentence
from headway.errors import DataError, HeadwayError

if TYPE_CHECKING:
    from headway.api import LanguageModel, Options

HELP = "/reset forgets the conversation, /quit (or Ctrl-D) ends it, Ctrl-C cuts a reply short"


@with_options
def command(
    run: SamplingRun,
    system: Annotated[str | None, typer.Option("--system", help="what the model is told first")] = None,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy")] = 0.8,
) -> None:
    """Talk with a model. Replies go to stdout, one per line that is read; remarks go to stderr."""
    lm = run.load(task="causal-lm")
    if lm.tokenizer is None or lm.tokenizer.chat_template is None:
        raise DataError(
            f"{run.model}: no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): this "
            f"model was not trained to talk; continue a text with: headway generate {run.model}"
        )
    talk(lm, system, run.options(temperature=temperature))


def talk(lm: "LanguageModel", system: str | None, options: "Options") -> None:
    """Reads lines until the end of the input or /quit. A turn that fails is forgotten; the talk goes on."""
    first = [] if system is None else [{"role": "system", "content": system}]
    messages = list(first)
    tty = sys.stdin.isatty()
    if tty:
        note(HELP)
    seed = options.get("seed", 0)
    while (line := _read(tty)) is not None:
        if line == "/quit":
            return
        if line == "/reset":
            messages = list(first)
            note("forgotten")
        elif line.startswith("/"):
            note(f"there is no {line.split()[0]}: {HELP}")
        elif line.strip():
            messages.append({"role": "user", "content": line})
            reply = _reply(lm, messages, {**options, "seed": seed + len(messages)})
            if reply is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": reply})


def _read(tty: bool) -> str | None:
    if tty:
        print("> ", end="", file=sys.stderr, flush=True)
    line = read_stdin(sys.stdin.readline)
    return line.rstrip("\r\n") if line else None


def _reply(lm: "LanguageModel", messages: list[dict[str, str]], options: "Options") -> str | None:
    from headway.generate.loop import collect

    deltas = []
    try:
        for delta in lm.stream_chat(messages, **options):
            deltas.append(delta)
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        print(flush=True)
        note("cut short")
        return "".join(d.text for d in deltas)
    except HeadwayError as error:
        print(flush=True)
        note(f"headway: error: {error}\n(this turn is forgotten; /reset forgets all)")
        return None
    print(flush=True)
    found = collect(deltas, 0)
    note(f"[{sentence(found).partition(' + ')[2]}]")
    return found.text
