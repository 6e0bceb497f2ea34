"""`headway train`: a run by flags, by a YAML file, or by a YAML file with key=value overrides."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli._settings import SettingsCommand, resolve
from headway.cli._shared import JsonOption, attributes, note, print_report
from headway.report import table
from headway.train import config_yaml

if TYPE_CHECKING:
    from headway.train import TrainResult

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings, as in the YAML file")
]
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


def run(
    overrides: Overrides = None,
    config: Config = None,
    resume: Resume = "never",
    print_config: PrintConfig = False,
    dry_run: DryRun = False,
    json: JsonOption = False,
    **flags: Any,
) -> int:
    """Train a model: a decoder on the next token of a text, an encoder on masked ones, a translator on pairs of
    sentences (--task translation). Resumes bit for bit."""
    settings = resolve(config, overrides, flags)
    if print_config:
        print(config_yaml(settings), end="")
        return 0
    if dry_run:
        from headway.train.dry_run import describe_run

        plan = describe_run(settings)
        print_report(plan, plan.text(), json)
        return 0
    from headway.train import Interrupted, train

    try:
        result = train(settings, resume=resume)
    except Interrupted as stop:
        own = shlex.quote(str(Path(settings.out) / "config.yaml"))
        note(f"saved {stop.checkpoint}\ngo on with: headway train --config {own} --resume auto")
        return 130
    _print(result, json)
    return 0


command = SettingsCommand(run)


def _print(result: TrainResult, json: bool) -> None:
    held, measured = result.validation, ("loss", "bits_per_byte", "accuracy")
    own = ("model", "metrics", "curve", "steps", "trained_tokens", "seconds", "loss", "accuracy")
    report = attributes(result, *own) | {f"val_{name}": getattr(held, name, None) for name in measured}
    held_out = {
        "held-out loss, nats per token": report["val_loss"],
        "held-out bits per byte": report["val_bits_per_byte"],
        "held-out accuracy": report["val_accuracy"],
    }
    rows: list[tuple[str, object]] = [
        ("steps", result.steps),
        ("trained tokens", result.trained_tokens),
        ("loss of the last step, nats per token", result.loss),
        *((name, value) for name, value in held_out.items() if value is not None),
        ("model", str(result.model)),
        ("metrics", str(result.metrics)),
        ("curve", str(result.curve)),
    ]
    print_report(report, table(("what", "value"), rows) + f"\nnext: {result.next_command}", json)
