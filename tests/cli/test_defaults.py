"""What `--help` says of defaults is so: said once, and where a command has none of its own, by who fills it in."""

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
    """(command, option) of every option of a command and its own commands."""
    module, _, function = commands()[name].module.partition(":")
    given: Any = getattr(importlib.import_module(module), function or "command")
    if name == "train":
        given = with_flags(train_command, settings_of(None))
    whole = click_command(given)
    for own, command in (getattr(whole, "commands", None) or {"": whole}).items():
        yield from ((f"{name} {own}".strip(), p) for p in command.params if getattr(p, "help", None))


@pytest.mark.parametrize("name", commands())
def test_a_default_is_said_once(name: str) -> None:
    """Where an option has a value of its own, that is what is printed, and no words beside it."""
    found = list(options(name))
    assert found
    for command, option in found:
        assert len(SAID.findall(option.help)) <= 1, (command, option.name)
        assert option.default is None or not SAID.search(option.help), (command, option.name, option.default)


@pytest.mark.parametrize("task", TASKS)
def test_defaults_in_the_help_of_train_are_those_of_the_settings(task: str) -> None:
    kind = settings_of(task)
    params = click_command(with_flags(train_command, kind)).params
    printed = {p.name: p.help for p in params if getattr(p, "help", None)}
    compared = 0
    for name, field in kind.model_fields.items():
        said = SAID.findall(printed[name])
        if field.is_required():
            assert not said, name
        elif field.default not in (None, ()):
            value = yaml.safe_load(said[0])
            assert (
                value == field.default or str(value) == str(field.default) or said[0] == cell(field.default)
            ), name
            compared += 1
    assert compared > 10


def test_kv_heads_of_a_home_made_model_are_what_the_help_of_train_says() -> None:
    """heads / 4; heads in gpt2 and encoders; 1 in gpt_bigcode and falcon."""
    kind = settings_of("causal-lm")
    assert "[default: heads / 4; heads in gpt2 and encoders; 1 in" in str(
        kind.model_fields["kv_heads"].description
    )
    for family in ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_bigcode", "falcon"):
        given = {"data": "x", "task": "causal-lm", "family": family, "heads": 8, "depth": 2}
        found = make_spec(kind.of(given, "here"), 64).kv_heads
        assert found == {"gpt2": 8, "gpt_bigcode": 1, "falcon": 1}.get(family, 2), family


def test_literals_in_words_are_those_of_who_fills_them_in() -> None:
    """Options that are None unless given: what stands in the help is the default of what is behind."""
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
        (said,) = SAID.findall(helps[command, name])
        assert yaml.safe_load(said) == value, (command, name)
