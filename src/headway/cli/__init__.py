"""The command line: `headway COMMAND ...`.

One table names the commands. A command's module is imported when that command is run, and torch by the
command's own function, so `headway --help` answers at once.

A module `headway.cli.NAME` defines `command`: a function whose signature `typer` reads (or a click command).
What it returns is the exit code (None is 0).

Exit codes: 0 done, 1 an error (said on stderr), 2 wrong usage, 130 interrupted. Results go to stdout,
progress and notes to stderr.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Any

from headway.errors import HeadwayError, did_you_mean

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": (
        "headway_lab.cli.demo",
        "Three minutes here: patterns drawn, a model trained, the claims checked",
    ),
    "train": ("headway.cli.train", "Train a language model or an encoder; resumes bit for bit"),
    "train-translation": (
        "headway.cli.train_translation",
        "Train a translator on pairs of sentences; resumes bit for bit",
    ),
    "generate": ("headway.cli.generate", "Continue a prompt"),
    "translate": ("headway.cli.translate", "Translate texts, by beam search; BLEU against references"),
    "fill-mask": ("headway.cli.fill_mask", "Find words for masked places"),
    "classify": ("headway.cli.classify", "Label texts, pairs of texts, or stretches of texts"),
    "answer": ("headway.cli.answer", "Find the answer to a question in a text"),
    "embed": ("headway.cli.embed", "One vector for each text, or how alike texts are"),
    "chat": ("headway.cli.chat", "Talk with a model in the terminal"),
    "eval": ("headway.cli.eval", "Bits per byte and perplexity of a model on a text"),
    "convert": (
        "headway.cli.convert",
        "Turn a checkpoint into another format, and show that they are equal",
    ),
    "surgery": (
        "headway.cli.surgery",
        "Change a model: fewer kv heads, windows, longer rows; before and after",
    ),
    "show": ("headway.cli.show", "Draw an attention pattern and say what it costs"),
    "models": ("headway.cli.models", "The published sizes by name, and how Chinese encoders compare"),
    "inspect": ("headway.cli.inspect", "What a checkpoint is: sizes, positions, pairing, patterns"),
    "tokenize": ("headway.cli.tokenize", "Which pieces a text is cut into, with ids and places"),
    "plan": ("headway.cli.plan", "Does it fit, what does it move, how fast: before anything runs"),
    "explain": ("headway_lab.cli.explain", "Answer a question about attention by a run"),
    "bench": ("headway_lab.cli.bench", "What attention costs on this machine, beside its peers"),
    "doctor": ("headway.cli.doctor", "What is usable on this machine, and why not"),
}

USAGE = "usage: headway COMMAND [OPTIONS]   (headway COMMAND --help says more)"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that lacks a letter must not end a run
            stream.reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:] if argv is None else argv)
    sys.exit(_flush(code))


def run(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code, never raises for what a user can cause."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    name, rest = argv[0], list(argv[1:])
    if name in ("-V", "--version"):
        print(f"headway {version()}")
        return 0
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        known = ", ".join(COMMANDS)
        say(f"there is no {kind} {name!r}{did_you_mean(name, COMMANDS)}; the commands are {known}")
        return 2
    try:
        return _invoke(name, rest)
    except KeyboardInterrupt:
        print("\nheadway: interrupted", file=sys.stderr)
        return 130
    except HeadwayError as error:
        say(str(error))
        return 1
    except BrokenPipeError:
        return 1
    except OSError as error:
        say(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
        return 1


def _invoke(name: str, arguments: list[str]) -> int:
    import typer

    given: Any = importlib.import_module(COMMANDS[name][0]).command
    command: Any = given if hasattr(given, "make_context") else _click_command(given)
    try:
        with command.make_context(f"headway {name}", arguments) as context:
            result = command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort as stop:
        raise KeyboardInterrupt from stop
    except Exception as error:
        # click's usage errors print themselves. By their methods, not their class: typer may carry its own
        # click.
        show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
        if show is None or not isinstance(code, int):
            raise
        show()
        return code
    return result if isinstance(result, int) else 0


def _click_command(function: Any) -> Any:
    import typer

    app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=CONTEXT)
    app.command()(function)
    return typer.main.get_command(app)


CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def say(message: str) -> None:
    """An error, on stderr, in the one form that the command line uses."""
    print(f"headway: error: {message}", file=sys.stderr)


def overview() -> str:
    """What `headway --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}   {line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join(
        [
            "headway: Transformer models whose attention is declared.",
            "",
            USAGE,
            "",
            *lines,
            "",
            "  --version   print the version",
            "",
            "start here:  headway demo      headway show 'Window.last(8) | (Causal() & Sink(2))'",
        ]
    )


def version() -> str:
    """The installed version."""
    from importlib.metadata import version as installed

    return installed("headway")


def _flush(code: int) -> int:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        # The reader went away (`headway show ... | head -3`): nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
