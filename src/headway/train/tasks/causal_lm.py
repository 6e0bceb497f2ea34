"""Every token from those before it: how decoders are trained."""

from __future__ import annotations

import math
from typing import Any

from headway.checkpoints.restore import as_decoder
from headway.data import Rows, TokenFile
from headway.errors import ConfigError
from headway.generate import GenerationConfig, Sampling, generate
from headway.models import ModelSpec
from headway.text import Tokenizer
from headway.train.rows_config import RowsConfig
from headway.train.tasks.base import StepStats
from headway.train.tasks.text import TextTask
from headway.train.text_config import TextConfig


class CausalLM(TextTask):
    """The next token. Every token of a text but the first of each document is predicted once per epoch, so that its
    loss can be stated in bits per byte."""

    next_command = "headway generate {model} '...'"
    in_template = True

    @classmethod
    def unsupported(cls, spec: ModelSpec) -> str | None:
        if spec.encoder is not None:
            return f"{spec.family} is an encoder-decoder, which is trained on pairs of texts"
        return None if spec.causal else f"{spec.family} is an encoder, trained on masked tokens"

    @classmethod
    def check(cls, config: RowsConfig, spec: ModelSpec) -> None:
        super().check(config, spec)
        wrong = [n for n in ("mask_share", "whole_words", "pack") if getattr(config, n, None) is not None]
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)}: for masked-lm, but {spec.family} is a decoder and nothing is masked; leave it out"
            )

    @classmethod
    def rows(cls, file: TokenFile, config: TextConfig, tokenizer: Tokenizer, spec: ModelSpec) -> Rows:
        return Rows(file, config.context)

    def encoded_prompts(self) -> list[list[int]]:
        config = self.config
        prompts = [self.tokenizer.encode(text, eos=False) for text in config.sample_prompts]
        for text, ids in zip(config.sample_prompts, prompts, strict=True):
            if not ids or len(ids) + config.sample_tokens > config.context:
                raise ConfigError(
                    f"sample prompt {text!r} of {len(ids)} tokens and sample_tokens {config.sample_tokens} do not fit "
                    f"context {config.context} (at least one token is needed); shorten one of them"
                )
        return prompts

    def completed(self, model: Any, prompts: list[list[int]]) -> list[str]:
        """See `TextTask`: what follows, greedily, so that what changes is the model."""
        eos = () if self.tokenizer.eos is None else (self.tokenizer.eos,)
        greedy, most = Sampling(temperature=0.0), self.config.sample_tokens
        settings = GenerationConfig(max_new_tokens=most, sampling=greedy, eos=eos)
        found = generate(as_decoder(model), prompts, settings, tokenizer=self.tokenizer)
        return [f"|{continued.text}" for continued in found]

    def quality(self, stats: StepStats) -> dict[str, float | None]:
        """See `TextTask`: the loss times the average tokens per byte of the training text."""
        file = self.file
        bytes_per_token = file.text_bytes / max(1, len(file) - file.documents)
        known = stats.loss is not None and bytes_per_token
        return {"bits_per_byte": (stats.loss or 0.0) / math.log(2) / bytes_per_token if known else None}
