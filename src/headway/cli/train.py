"""`headway train`: a run by flags, by a YAML file, or by a YAML file with key=value overrides."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli._options import JsonOption
from headway.cli._settings import (
    Config,
    Overrides,
    PrintConfig,
    Resume,
    resolve,
    say_how_to_go_on,
    with_flags,
)
from headway.cli._shared import print_json
from headway.report import table
from headway.train import TrainConfig, config_yaml

if TYPE_CHECKING:
    from headway.train import TrainResult

DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="print model, counts, steps and memory; train nothing, write nothing"),
]


@with_flags(TrainConfig)
def command(
    overrides: Overrides = None,
    config: Config = None,
    resume: Resume = "never",
    print_config: PrintConfig = False,
    dry_run: DryRun = False,
    json: JsonOption = False,
    **flags: Any,
) -> int:
    """Train a decoder on the next token of a text, or an encoder on masked ones. Resumes bit for bit."""
    resolved = resolve(TrainConfig, config, overrides, flags)
    if print_config:
        print(config_yaml(resolved), end="")
        return 0
    if dry_run:
        from headway.train.dry_run import describe_run

        report = describe_run(resolved)
        print_json(report) if json else print(report.text())
        return 0
    from headway.train import Interrupted, train

    try:
        result = train(resolved, resume=resume)
    except Interrupted as stop:
        return say_how_to_go_on(resolved, stop.checkpoint)
    if json:
        print_json(_report(result))
    else:
        print(_text(result))
    return 0


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
