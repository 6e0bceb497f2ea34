"""Defaults in `--help` are stated once and true, also those that the code behind an option fills in."""

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from headway.cli import commands
from headway.cli._options import click_command
from headway.cli.train import run as train_command
from headway.cli.train import with_flags
from headway.report import cell
from headway.train.inputs import make_spec
from headway.train.tasks import TASKS, settings_of

SAID = re.compile(r"\[default: ([^\]]*)\]")


def options(name: str) -> Iterator[tuple[str, Any]]:
    """Yields (command, option) for each option of a command and of its subcommands."""
    module, _, function = commands()[name].module.partition(":")
    callback: Any = getattr(importlib.import_module(module), function or "command")
    if name == "train":
        callback = with_flags(train_command, settings_of(None))
    root = click_command(callback)
    for subcommand, command in (getattr(root, "commands", None) or {"": root}).items():
        yield from (
            (f"{name} {subcommand}".strip(), option)
            for option in command.params
            if getattr(option, "help", None)
        )


@pytest.mark.parametrize("name", commands())
def test_a_default_is_said_once(name: str) -> None:
    """If an option has a default value, click prints it, and the help text must not state one, too."""
    pairs = list(options(name))
    assert pairs
    for command, option in pairs:
        assert len(SAID.findall(option.help)) <= 1, (command, option.name)
        assert option.default is None or not SAID.search(option.help), (command, option.name, option.default)


@pytest.mark.parametrize("task", TASKS)
def test_defaults_in_the_help_of_train_are_those_of_the_settings(task: str) -> None:
    kind = settings_of(task)
    params = click_command(with_flags(train_command, kind)).params
    printed = {p.name: p.help for p in params if getattr(p, "help", None)}
    compared = 0
    for name, field in kind.model_fields.items():
        stated = SAID.findall(printed[name])
        if field.is_required():
            assert not stated, name
        elif field.default not in (None, ()):
            value = yaml.safe_load(stated[0])
            assert (
                value == field.default or str(value) == str(field.default) or stated[0] == cell(field.default)
            ), name
            compared += 1
    assert compared > 10


def test_kv_heads_of_a_home_made_model_are_what_the_help_of_train_says() -> None:
    """The default is heads / 4; heads in gpt2 and encoders; 1 in gpt_bigcode and falcon."""
    kind = settings_of("causal-lm")
    assert "[default: heads / 4; heads in gpt2 and encoders; 1 in" in str(
        kind.model_fields["kv_heads"].description
    )
    for family in ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_bigcode", "falcon"):
        settings = {"data": "x", "task": "causal-lm", "family": family, "heads": 8, "depth": 2}
        kv_heads = make_spec(kind.of(settings, "here"), 64).kv_heads
        assert kv_heads == {"gpt2": 8, "gpt_bigcode": 1, "falcon": 1}.get(family, 2), family


def test_literals_in_words_are_those_of_who_fills_them_in() -> None:
    """For options that are None unless given, the help states the default of the code that fills it in."""
    from headway.generate.config import Beams
    from headway_lab.explain.runs import Budget

    helps = {(c, o.name): o.help for name in ("generate", "diff") for c, o in options(name)}
    beams = Beams(4)
    for command, name, value in (
        ("generate", "length_penalty", beams.length_penalty),
        ("generate", "early_stopping", beams.early_stopping),
        ("generate", "n_best", beams.n_best),
        ("diff", "steps", Budget().steps),
    ):
        (stated,) = SAID.findall(helps[command, name])
        assert yaml.safe_load(stated) == value, (command, name)
