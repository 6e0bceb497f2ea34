"""`headway train-translation`: a Transformer of 2017 on pairs of sentences."""

from __future__ import annotations

import shlex
from typing import Any

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
from headway.train.config_io import config_yaml
from headway.train.translation_config import TranslationConfig


@with_flags(TranslationConfig)
def command(
    overrides: Overrides = None,
    config: Config = None,
    resume: Resume = "never",
    print_config: PrintConfig = False,
    json: JsonOption = False,
    **flags: Any,
) -> int:
    """Train a translator on two files of sentences, line by line (Vaswani et al. 2017, section 5).

    Resumes bit for bit."""
    settings = resolve(TranslationConfig, config, overrides, flags)
    if print_config:
        print(config_yaml(settings), end="")
        return 0
    from headway.train.callbacks import Interrupted
    from headway.train.run import train

    try:
        result = train(settings, resume=resume)
    except Interrupted as stop:
        return say_how_to_go_on(settings, stop.checkpoint)
    if json:
        print_json(result)
        return 0
    rows: list[tuple[str, object]] = [
        ("steps", result.steps),
        ("loss of the last step, nats per token", result.loss),
    ]
    if result.validation is not None:
        rows.append(("held-out loss, nats per token", result.validation.loss))
    rows += [("model", str(result.model)), ("metrics", str(result.metrics)), ("curve", str(result.curve))]
    print(table(("what", "value"), rows))
    print(f"next: headway translate {shlex.quote(str(result.model))} 'A man rides a horse.'")
    return 0
