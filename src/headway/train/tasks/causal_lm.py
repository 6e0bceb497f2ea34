"""Every token from those before it: how decoders are trained."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from headway.data import Rows, TokenFile
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.text import Tokenizer
from headway.train.callbacks import Callback
from headway.train.sampling import continued
from headway.train.tasks.base import StepStats
from headway.train.tasks.text import TextTask
from headway.train.text_config import TextConfig


class CausalLM(TextTask):
    """The next token. Every token of a text but the first of each document is predicted once per epoch, so that its
    loss can be stated in bits per byte."""

    next_command = "headway generate {model} --prompt '...'"
    in_template = True

    def __init__(self, config: TextConfig, folder: Path, start: Path | None, dtype: torch.dtype) -> None:
        super().__init__(config, folder, start, dtype)
        file = self.train_rows.file
        self.bytes_per_token = file.text_bytes / max(1, len(file) - file.documents)

    @classmethod
    def unsupported(cls, spec: ModelSpec) -> str | None:
        if spec.encoder is not None:
            return f"{spec.family} is an encoder-decoder, which is trained on pairs of texts"
        return None if spec.causal else f"{spec.family} is an encoder, trained on masked tokens"

    @classmethod
    def check(cls, config: TextConfig, spec: ModelSpec) -> None:
        super().check(config, spec)
        wrong = [n for n in ("mask_share", "whole_words", "pack") if getattr(config, n) is not None]
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)}: for masked-lm, but {spec.family} is a decoder and nothing is masked; leave it out"
            )

    @classmethod
    def rows(cls, file: TokenFile, config: TextConfig, tokenizer: Tokenizer, spec: ModelSpec) -> Rows:
        return Rows(file, config.context)

    def callbacks(self) -> list[Callback]:
        """See `Task`: prompts are continued."""
        return [continued(self.config, self.tokenizer)] if self.config.sample_prompts else []

    def quality(self, stats: StepStats) -> dict[str, float | None]:
        """See `TextTask`: the loss times the average tokens per byte of the training text."""
        known = stats.loss is not None and self.bytes_per_token
        return {"bits_per_byte": (stats.loss or 0.0) / math.log(2) / self.bytes_per_token if known else None}
