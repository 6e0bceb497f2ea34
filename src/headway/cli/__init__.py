"""The command line: `headway COMMAND ...`.

`COMMANDS` are headway's own commands; installed packages add theirs by entry points of the group `headway.commands`:

    [project.entry-points."headway.commands"]
    name = "package.module:VALUE"                  # VALUE = Command("one line of help", "package.module_of_command")

A command's module is imported when the command runs, and torch only inside the command's function, so that `headway
--help` answers at once.

Exit codes: 0 success, 1 error (reported on stderr), 2 wrong usage, 130 interrupted. Results go to stdout, progress and
notes to stderr."""

import importlib
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points, version
from io import TextIOWrapper
from types import MappingProxyType
from typing import Any, NamedTuple

from headway.cores import limit_threads
from headway.errors import ConfigError, HeadwayError, did_you_mean

GROUP = "headway.commands"


class Command(NamedTuple):
    """A command.

    help    its line in `headway --help`
    module  the module that defines it as `command`, or as the name after a colon ("module:name"): a function whose
            parameters `headway.cli._options` reads, or a click command. Its result is the exit code (None is 0)
    offers  features that it gives to other commands: name -> module that defines the feature as `command`
    """

    help: str
    module: str
    offers: Mapping[str, str] = MappingProxyType({})


COMMANDS = {
    name: Command(help, f"headway.cli.{place}")
    for name, place, help in (
        ("train", "train", "Train a language model, an encoder or a translator; resume bit for bit"),
        (
            "data",
            "data",
            "Prepare the data of the shipped recipes, or say where to get it",
        ),
        ("preview", "preview", "Show the tokens that a model would be trained on, and their loss mask"),
        ("generate", "generate", "Continue a prompt"),
        ("translate", "translate", "Translate texts by beam search; report BLEU against references"),
        ("fill-mask", "encoders:fill_mask", "Fill in masked words"),
        ("classify", "encoders:classify", "Label texts, pairs of texts, or spans of texts"),
        ("answer", "encoders:answer", "Find the answer to a question in a text"),
        ("embed", "encoders:embed", "Embed texts as vectors, or compare how similar they are"),
        ("chat", "chat", "Chat with a model in the terminal"),
        ("run", "serve:run", "Download a model if needed, serve it, and chat with it"),
        ("serve", "serve", "Serve models over HTTP with an OpenAI-compatible API"),
        ("eval", "evaluate", "Measure bits per byte on a text, or run tasks of lm-evaluation-harness"),
        ("instruct", "instruct", "Generate instruction data from seed tasks by asking a model"),
        ("judge", "judge", "Let a model judge the answers of two other models"),
        (
            "convert",
            "convert",
            "Convert a checkpoint to another format, and verify that both compute the same",
        ),
        (
            "surgery",
            "surgery",
            "Change a model (fewer kv heads, windows, longer contexts), and measure it",
        ),
        (
            "quantize",
            "surgery:quantize",
            "Quantize weights to 8 or 4 bits; measure perplexity and KL before and after",
        ),
        ("show", "show", "Draw an attention pattern and report what it costs"),
        ("models", "inspect:models", "List published model sizes by name, and compare Chinese encoders"),
        ("inspect", "inspect", "Describe a checkpoint: sizes, positions, pairing, patterns"),
        ("tokenize", "inspect:tokenize", "Show the tokens of a text, with ids and offsets"),
        ("plan", "plan", "Estimate memory, traffic and speed before anything runs"),
        ("diff", "diff", "Compare two models, in words and numbers"),
        ("doctor", "doctor", "Report what is usable on this machine, and why something is not"),
    )
}

LABORATORY = ("demo", "explain", "bench")
"""Commands of the optional package that `NEEDS_IT` tells how to install."""
NEEDS_IT = 'which is in the package headway-lab; pip install "headway[lab]"'

USAGE = "usage: headway COMMAND [OPTIONS]   (headway COMMAND --help has more)"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits the process with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a character that the terminal lacks must not end a run
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, TextIOWrapper):  # in any locale; `_shared.read_stdin` reports invalid UTF-8
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    warnings.formatwarning = _one_line
    limit_threads()
    code = run(sys.argv[1:] if argv is None else argv)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        _silence()
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Runs one command and returns its exit code. Errors that a user can cause are reported, not raised."""
    name, arguments = (argv[0], list(argv[1:])) if argv else ("--help", [])
    if name in ("-V", "--version"):
        print(f"headway {version('headway')}")
        return 0
    try:
        if name in ("-h", "--help", "help"):
            print(overview())
            return 0
        command = COMMANDS.get(name) or commands().get(name)
        if command is None:
            if name in LABORATORY:
                report_error(f"there is no command {name!r} here, {NEEDS_IT}")
                return 2
            kind, known = "option" if name.startswith("-") else "command", commands()
            hint = did_you_mean(name, known)
            report_error(f"there is no {kind} {name!r}{hint}; the commands are {', '.join(known)}")
            return 2
        return _invoke(name, command, arguments)
    except KeyboardInterrupt:
        print("\nheadway: interrupted", file=sys.stderr)
        return 130
    except HeadwayError as error:
        report_error(str(error))
        return 1
    except BrokenPipeError:  # the reader has closed the pipe (`headway show ... | head -3`)
        _silence()
        return 0
    except OSError as error:
        report_error(
            f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        )
        return 1


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Returns a warning as a note, without the line of code that raised it, which means nothing to a user of the
    command."""
    return f"headway: {message}\n"


def _silence() -> None:
    """Discards further output, since nobody reads it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def commands() -> dict[str, Command]:
    """Returns all commands by name: headway's own, then those of installed packages.

    Raises ConfigError if a package's command cannot be loaded, or if two commands have the same name."""
    known = dict(COMMANDS)
    for point in entry_points(group=GROUP):
        owner = point.dist.name if point.dist is not None else point.value
        try:
            command: Command = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"command {point.name!r} of the package {owner} cannot be loaded ({point.value}: {error}); "
                "repair or uninstall that package"
            ) from error
        if point.name in known:
            raise ConfigError(
                f"command {point.name!r} of the package {owner} exists already ({known[point.name].module}); "
                "uninstall one of the two"
            )
        known[point.name] = command
    return known


def offered(name: str) -> Any:
    """Returns the feature that an installed command offers under this name. Raises ConfigError if there is none."""
    for command in commands().values():
        if name in command.offers:
            return importlib.import_module(command.offers[name]).command
    raise ConfigError(f"no installed package offers {name!r}, {NEEDS_IT}")


def _invoke(name: str, entry: Command, arguments: list[str]) -> int:
    import typer

    from headway.cli._options import click_command

    module, _, function = entry.module.partition(":")
    command = click_command(getattr(importlib.import_module(module), function or "command"))
    try:
        with command.make_context(f"headway {name}", arguments) as context:
            result = context.command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort as stop:
        raise KeyboardInterrupt from stop
    except Exception as error:
        # click's usage errors print themselves. They are recognized by their methods, since typer may bundle its own
        # click with other classes.
        show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
        if show is None or not isinstance(code, int):
            raise
        show()
        return code
    return result if isinstance(result, int) else 0


def report_error(message: str) -> None:
    """Prints an error on stderr, in the format of all commands."""
    print(f"headway: error: {message}", file=sys.stderr)


def overview() -> str:
    """Returns the text of `headway --help`."""
    known = commands()
    width = max(map(len, known))
    lines = "\n".join(f"  {name:<{width}}   {command.help}" for name, command in known.items())
    first = "headway demo      " if "demo" in known else ""
    return (
        f"headway: Transformer models whose attention is declared.\n\n{USAGE}\n\n{lines}\n\n"
        "  --version   print the version\n\n"
        f"start here:  {first}headway show 'Window.last(8) | (Causal() & Sink(2))'"
    )
