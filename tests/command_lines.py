"""Command lines of pages and tables: read by the command that they name, and never run."""

import importlib
import re
import shlex
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer

from headway.cli import commands
from headway.cli._shared import application
from headway.cli.diff import find
from headway.models import catalog
from headway.patterns import parse
from headway.recipes import read_recipe
from headway.train.config_io import STAGES, read_yaml
from headway_lab.explain import TOPICS

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(headway [a-z-]+ [^`]+)`")
SHELL = ("|", "<", ">")  # what follows one of these is not the command's
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*$|\.\.\.$|.*/")  # MODEL, runs/mine: what a reader has


def lines_of(page: str) -> list[str]:
    """The `headway` lines of a page's shell blocks, and those behind a `$` in console blocks."""
    found = []
    for language, block in BLOCK.findall(page):
        joined = block.replace("\\\n", " ").splitlines()
        found += [line.strip() for line in joined if language == "sh"]
        found += [line[2:] for line in joined if language == "console" and line.startswith("$ ")]
    return [line for line in found if line.startswith("headway ")]


def inline_of(page: str) -> list[str]:
    """The `headway` lines within a page's text."""
    return INLINE.findall(BLOCK.sub("", page))


@cache
def click_command(name: str) -> Any:
    """A command of the command line, as click has it."""
    module, _, function = commands()[name].module.partition(":")
    given = getattr(importlib.import_module(module), function or "command")
    if hasattr(given, "make_context"):
        return given
    app = application()
    app.command()(given)
    return typer.main.get_command(app)


@patch("headway.checkpoints.remote.local_model", Path)  # models that a reader has: nothing is fetched
def read_command(line: str) -> dict[str, Any]:
    """The values of a line's options and arguments. Raises click's errors for what the command does not take, and an
    error for a topic, recipe, setting, size or pattern that is not there."""
    words = shlex.split(re.split(r"\s#", line)[0])
    program, name, *arguments = takewhile(lambda word: word not in SHELL, words)
    assert program == "headway", line
    if name == "train":
        arguments = _without_own_config(arguments)
    command = click_command(name)
    while hasattr(command, "resolve_command"):
        with command.make_context(name, arguments) as context:
            name, command, arguments = command.resolve_command(
                context, [*context._protected_args, *context.args]
            )
    with command.make_context(name, arguments) as context:
        values: dict[str, Any] = dict(context.params)
    _look_up(name, values)
    return values


def _without_own_config(arguments: list[str]) -> list[str]:
    """Without the settings of a run that a reader has."""
    at = arguments.index("--config") if "--config" in arguments else len(arguments)
    ours = arguments[at + 1 : at + 2] and arguments[at + 1].startswith("recipes/")
    return arguments if ours else arguments[:at] + arguments[at + 2 :]


def _look_up(name: str, values: dict[str, Any]) -> None:
    """What a line names beyond its options."""
    if name == "explain" and values["topic"] is not None:
        assert values["topic"] in (*TOPICS, "all"), values["topic"]
    elif name == "plan":
        assert PLACEHOLDER.match(values["model"]) or values["model"] in catalog.names(), values["model"]
    elif name == "diff":
        for one in (values["first"], values["second"]):
            assert PLACEHOLDER.match(one) or find(one) is None or one in catalog.names(), one
    elif name == "show":
        for pattern in values["patterns"]:
            parse(pattern)
    elif name == "train" and str(values["config"]).startswith("recipes/"):
        path = ROOT / values["config"]
        if STAGES in read_yaml(path):
            read_recipe(path, [one for one in values["overrides"] or () if "=" in one], small=values["small"])
