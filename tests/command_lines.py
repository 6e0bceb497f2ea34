"""Command lines in docs: parsed by the command that they name, without running it."""

import importlib
import re
import shlex
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from headway.cli import _options, commands
from headway.cli.diff import find
from headway.cli.train import run, settings_of, with_flags
from headway.models import catalog
from headway.patterns import parse
from headway.recipes import read_recipe
from headway.train.config_io import STAGES, read_config, read_yaml
from headway_lab.explain import TOPICS
from tests.pages import BLOCK, ROOT, commands_of

INLINE = re.compile(r"`(headway [a-z-]+ [^`]+)`")
INDENTED = re.compile(r"^(?: {4,}|# +)\$? *(headway [a-z-]+(?: +\S+)*)", re.MULTILINE)
# Rows of tables and words of a sentence, which look like commands.
NOT_TYPED = {"headway one row", "headway bf16"}
SHELL = ("|", "<", ">")  # words after one of these do not belong to the command
PLACEHOLDER = re.compile(r"[A-Z][A-Z_-]*$|\.\.\.$|.*/")  # MODEL, runs/mine: things that a reader has


def lines_of(page: str) -> list[str]:
    """Returns the `headway` lines of a page's shell and console blocks."""
    typed = [line for language, text in BLOCK.findall(page) for line in commands_of(language, text)]
    return [line for line in typed if line.startswith("headway ")]


def inline_of(page: str) -> list[str]:
    """Returns the `headway` commands in backquotes in a page's text."""
    return [line.replace("\\|", "|") for line in INLINE.findall(BLOCK.sub("", page)) if line not in NOT_TYPED]


def indented_of(text: str) -> list[str]:
    """Returns the `headway` lines of indented blocks and comments, without remarks after two spaces."""
    joined = re.sub(r" *\\\n[ #]*", " ", BLOCK.sub("", text))
    return [re.split(r"\s{2,}(?!-)", line)[0] for line in INDENTED.findall(joined)]


@cache
def click_command(name: str) -> Any:
    """Returns a command as click's object."""
    module, _, function = commands()[name].module.partition(":")
    return _options.click_command(getattr(importlib.import_module(module), function or "command"))


@patch("headway.checkpoints.remote.local_model", Path)  # models are taken as local: nothing is fetched
def read_command(line: str) -> dict[str, Any]:
    """Returns the values of a line's options and arguments. Raises click's errors for arguments that the command does
    not take, and an error for a topic, recipe, setting, size or pattern that does not exist."""
    program, name, *arguments = takewhile(lambda word: word not in SHELL, shlex.split(line))
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


def read_mention(line: str) -> None:
    """Checks a command mentioned in a sentence, which may be incomplete: its name, options, and settings of its task.
    Raises AssertionError for what does not exist."""
    name, *words = takewhile(lambda word: word not in SHELL, shlex.split(line)[1:])
    assert name in commands(), line
    if name == "train":
        task = words[words.index("--task") + 1] if "--task" in words else None
        kind = settings_of(None if task is None or PLACEHOLDER.match(task) else task)
        command = _options.click_command(with_flags(run, kind))
    else:
        command = click_command(name)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    known = {"-h", "--help"}.union(*(set(p.opts) | set(p.secondary_opts) for p in command.params))
    if not hasattr(command, "commands"):
        assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known, line


def _without_own_config(arguments: list[str]) -> list[str]:
    """Returns the arguments without `--config FILE`, unless the file is one of `recipes/`."""
    index = arguments.index("--config") if "--config" in arguments else len(arguments)
    from_recipes = arguments[index + 1 : index + 2] and arguments[index + 1].startswith("recipes/")
    return arguments if from_recipes else arguments[:index] + arguments[index + 2 :]


def _look_up(name: str, values: dict[str, Any]) -> None:
    """Checks the names in a line beyond its options: topics, models, patterns, settings. Raises if one is unknown."""
    if name == "explain" and values["topic"] is not None:
        assert values["topic"] in (*TOPICS, "all", "figures"), values["topic"]
    elif name == "plan":
        assert PLACEHOLDER.match(values["model"]) or values["model"] in catalog.names(), values["model"]
    elif name == "diff":
        for word in (values["first"], values["second"]):
            assert PLACEHOLDER.match(word) or find(word) is None or word in catalog.names(), word
    elif name == "show":
        for pattern in values["patterns"]:
            parse(pattern)
    elif name == "train" and str(values.get("config")).startswith("recipes/"):
        path = ROOT / values["config"]
        overrides = [word for word in values["overrides"] or () if "=" in word]
        if STAGES in read_yaml(path):
            read_recipe(path, overrides, small=values["small"])
        else:
            read_config(path, overrides, {}, {}, small=values["small"])
