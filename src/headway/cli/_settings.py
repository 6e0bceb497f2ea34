"""Runs by flags, by a YAML file, or by a YAML file with key=value overrides: what the training commands share.

The flags are generated from the fields of the settings: name, type, help and unit are written once, there.
"""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from headway.cli._shared import note
from headway.train.config_io import read_settings
from headway.train.settings import Settings

Config = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file of settings (those below, with _ for -)", rich_help_panel="Run"),
]
Resume = Annotated[
    str,
    typer.Option(
        "--resume",
        metavar="never|auto|PATH",
        help="auto: go on from the last checkpoint in --out, or begin; PATH: from that checkpoint",
        rich_help_panel="Run",
    ),
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="print the resolved settings as YAML and stop")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings, as in the YAML file")
]


ENVIRONMENT = ("threads", "backend")  # HEADWAY_THREADS and HEADWAY_BACKEND, as in every command
Kind = TypeVar("Kind", bound=Settings)


def resolve(
    kind: type[Kind], config: Path | None, overrides: list[str] | None, flags: Mapping[str, Any]
) -> Kind:
    """The settings of a run: the environment, the YAML file, key=value overrides, flags; later ones win."""
    given = {name: value for name, value in flags.items() if value is not None and value != []}
    around = {
        name: os.environ.get(f"HEADWAY_{name.upper()}") for name in ENVIRONMENT if name in kind.model_fields
    }
    return read_settings(kind, config, overrides or (), given, {k: v for k, v in around.items() if v})


def say_how_to_go_on(config: Settings, checkpoint: Path) -> int:
    """After an interruption; the exit status."""
    settings = shlex.quote(str(Path(config.out) / "config.yaml"))
    note(f"saved {checkpoint}\ngo on with: headway {config.command} --config {settings} --resume auto")
    return 130


def with_flags(kind: type[Settings]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command, instead of its `**flags`, one option for each field of `kind`."""

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        own = inspect.signature(function, eval_str=True)
        fixed = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        both = fixed + [_flag(name, field) for name, field in kind.model_fields.items()]
        function.__signature__ = own.replace(parameters=both)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in both} | {"return": int}
        return function

    return decorate


def _flag(name: str, field: Any) -> inspect.Parameter:
    """One field as one option; None means that it was not given."""
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)] or [field.annotation]
    kind = kinds[0] if len(kinds) == 1 or get_origin(field.annotation) is not Literal else str
    option = f"--{name.replace('_', '-')}"
    extra = field.json_schema_extra
    text = field.description
    if get_origin(field.annotation) is Literal:
        kind, text = str, f"{text} ({' | '.join(get_args(field.annotation))})"
    if get_origin(field.annotation) is tuple:
        kind, text = list[str], f"{text} (may be given several times)"
    if not field.is_required() and "[default:" not in text and field.default not in (None, ()):
        default = (
            {True: "yes", False: "no"}.get(field.default, field.default) if kind is bool else field.default
        )
        text += f" [default: {default}]"
    if name in ENVIRONMENT:
        text += f" [env: HEADWAY_{name.upper()}]"
    declared = f"{option}/--no-{name.replace('_', '-')}" if kind is bool else option
    unit = str(extra["unit"]).upper().replace(" ", "-") if "unit" in extra else None
    info = typer.Option(declared, help=text, rich_help_panel=extra["group"], show_default=False, metavar=unit)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )
