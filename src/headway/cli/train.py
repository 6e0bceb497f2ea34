"""`headway train`: a run by flags, by a YAML file, or by a YAML file with key=value overrides.

The flags are generated from the fields of TrainConfig: name, type, help and unit are written once, there.
"""

from __future__ import annotations

import inspect
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from headway.cli._shared import note, print_json, table
from headway.train import TrainConfig, config_yaml, read_config

if TYPE_CHECKING:
    from headway.train import TrainResult

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
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="print model, counts, steps and memory; train nothing, write nothing"),
]
Json = Annotated[bool, typer.Option("--json", help="print the result as JSON on stdout")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings, as in the YAML file")
]


ENVIRONMENT = ("threads", "backend")  # HEADWAY_THREADS and HEADWAY_BACKEND, as in every command


def command(
    overrides: Overrides = None,
    config: Config = None,
    resume: Resume = "never",
    print_config: PrintConfig = False,
    dry_run: DryRun = False,
    json: Json = False,
    **flags: Any,
) -> int:
    """Train a decoder on the next token of a text, or an encoder on masked ones. Resumes bit for bit."""
    given = {name: value for name, value in flags.items() if value is not None and value != []}
    around = {name: os.environ[f"HEADWAY_{name.upper()}"] for name in ENVIRONMENT if _is_set(name)}
    resolved = read_config(config, overrides or (), given, around)
    if print_config:
        print(config_yaml(resolved), end="")
        return 0
    if dry_run:
        from headway.train.preview import preview

        report = preview(resolved)
        print_json(report) if json else print(report.text())
        return 0
    from headway.train import Interrupted, train

    try:
        result = train(resolved, resume=resume)
    except Interrupted as stop:
        settings = shlex.quote(str(Path(resolved.out) / "config.yaml"))
        note(f"saved {stop.checkpoint}\ngo on with: headway train --config {settings} --resume auto")
        return 130
    if json:
        print_json(_report(result))
    else:
        print(_text(result))
    return 0


def _is_set(name: str) -> bool:
    return bool(os.environ.get(f"HEADWAY_{name.upper()}"))


def _report(result: TrainResult) -> dict[str, Any]:
    held = result.validation
    return {
        "model": result.model,
        "metrics": result.metrics,
        "curve": result.curve,
        "steps": result.steps,
        "trained_tokens": result.trained_tokens,
        "seconds": result.seconds,
        "loss": result.loss,
        "accuracy": result.accuracy,
        "val_loss": held.loss if held else None,
        "val_bits_per_byte": held.bits_per_byte if held else None,
        "val_accuracy": held.accuracy if held else None,
    }


def _text(result: TrainResult) -> str:
    rows: list[tuple[str, object]] = [
        ("steps", result.steps),
        ("trained tokens", result.trained_tokens),
        ("loss of the last step, nats per token", result.loss),
    ]
    if result.validation is not None:
        rows += [
            ("held-out loss, nats per token", result.validation.loss),
            ("held-out bits per byte", result.validation.bits_per_byte)
            if result.validation.accuracy is None
            else ("held-out accuracy", result.validation.accuracy),
        ]
    rows += [("model", str(result.model)), ("metrics", str(result.metrics)), ("curve", str(result.curve))]
    model = shlex.quote(str(result.model))
    masked = result.accuracy is not None
    following = (
        f"next: headway eval {model} --data ..."
        if masked
        else f"next: headway generate {model} --prompt '...'"
    )
    return table(("what", "value"), rows) + "\n" + following


def _flag(name: str, field: Any) -> inspect.Parameter:
    """One field of TrainConfig as one option; None means that it was not given."""
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


def _with_flags(function: Any) -> None:
    own = inspect.signature(function, eval_str=True)
    fixed = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    flags = [_flag(name, field) for name, field in TrainConfig.model_fields.items()]
    function.__signature__ = own.replace(parameters=fixed + flags)
    function.__annotations__ = {p.name: p.annotation for p in fixed + flags} | {"return": int}


_with_flags(command)
