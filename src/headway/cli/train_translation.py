"""`headway train-translation`: a Transformer of 2017 on pairs of sentences."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from headway.cli._shared import JsonOption, print_json, table
from headway.train.translation_config import TranslationConfig


def command(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings, as in the YAML file")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML file of settings")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the resolved settings as YAML and stop")
    ] = False,
    json: JsonOption = False,
) -> None:
    settings = TranslationConfig.read(config, overrides or ())
    if print_config:
        print(settings.yaml(), end="")
        return
    from headway.train.translation import train_translation

    result = train_translation(settings)
    if json:
        print_json(result)
        return
    rows: list[tuple[str, object]] = [
        ("steps", result.steps),
        ("loss of the last step, nats per token", result.loss),
    ]
    if result.validation_loss is not None:
        rows.append(("held-out loss, nats per token", result.validation_loss))
    rows += [("model", str(result.model)), ("metrics", str(result.metrics)), ("curve", str(result.curve))]
    print(table(("what", "value"), rows))
    print(f"next: headway translate {shlex.quote(str(result.model))} 'A man rides a horse.'")


def _help() -> str:
    lines = ["Train a translator on two files of sentences, line by line (Vaswani et al. 2017, section 5). It is not "
             "resumed; Ctrl-C ends it and saves what was learned.", "Settings:"]  # fmt: skip
    for name, field in TranslationConfig.model_fields.items():
        usual = "" if field.is_required() or field.default is None else f" [default: {field.default}]"
        lines.append(f"{name}: {field.description}{usual}")
    return "\n\n".join(lines)


command.__doc__ = _help()
