"""What training on text has in common, whichever of its tokens are predicted."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from headway.data import MaskedRows, Rows, TokenFile
from headway.errors import ConfigError
from headway.models import Decoder, Encoder, ModelSpec
from headway.text import Tokenizer
from headway.train.callbacks import Callback, CallbackContext
from headway.train.evaluation import Evaluation, evaluate
from headway.train.inputs import TOKENS, first_model, given_tokenizer, model_spec
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.plan import BYTES_PER_TOKEN
from headway.train.tasks.base import Foreseen
from headway.train.tasks.rows import RowsTask
from headway.train.text_config import TextConfig
from headway.train.texts import prepare


class TextTask(RowsTask):
    """Rows of tokens of a text. A kind of it says which models it trains, and which tokens of a row are predicted."""

    settings = TextConfig
    measured_by = ("data", "context", "mask_share", "whole_words", "pack")
    by_token = True
    config: TextConfig
    in_template: ClassVar[bool]
    """Whether the documents of the token file begin and end as the tokenizer's template says."""

    def __init__(self, config: TextConfig, folder: Path, start: Path | None, dtype: torch.dtype) -> None:
        self.config = config
        spec = model_spec(config)
        tokenizer, train, validation, self.remarks = prepare(
            config, folder, start, in_template=self.in_template
        )
        self.held_rows = None if validation is None else self.rows(validation, config, tokenizer, spec)
        rows = self.rows(train, config, tokenizer, spec)
        self.begin(first_model(config, tokenizer.vocab_size)[0], tokenizer, rows, dtype)
        self.data, self.file = train.described(), train
        self.held_rows_of: dict[int, Rows | MaskedRows] = {}
        for length in config.eval_contexts:
            if validation is None:
                raise ConfigError(
                    "eval_contexts are lengths of held-out rows; give validation or validation_share"
                )
            other = config.model_copy(update={"context": length})
            self.check(other, spec)
            self.held_rows_of[length] = self.rows(validation, other, tokenizer, spec)

    @classmethod
    def foresee(cls, config: TextConfig) -> Foreseen:
        """See `Task`: exact for token files."""
        tokenizer, path, context = given_tokenizer(config), Path(config.data), config.context
        spec = model_spec(config, None if tokenizer is None else tokenizer.vocab_size)
        exact = path.suffix == TOKENS
        if exact:
            file = TokenFile(path)
            tokens = len(file)
            rows = (
                -(-tokens // context) if tokenizer is None else len(cls.rows(file, config, tokenizer, spec))
            )
        else:
            files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
            size = sum(p.stat().st_size for p in files) * (1.0 - config.validation_share)
            tokens = max(2, int(size / BYTES_PER_TOKEN))
            rows = -(-tokens // context)
        return cls.foreseen(config, spec, {"training tokens": tokens}, rows, exact=exact)

    @property
    def held_steps(self) -> float:
        """See `Task`: rows of all lengths."""
        others = sum(len(rows) * length for length, rows in self.held_rows_of.items())
        return super().held_steps + others / self.config.context / self.config.rows_per_step

    @classmethod
    @abstractmethod
    def rows(
        cls, file: TokenFile, config: TextConfig, tokenizer: Tokenizer, spec: ModelSpec
    ) -> Rows | MaskedRows:
        """Rows of `config.context` tokens of a token file; as they are when held-out text is measured, where something
        in them is drawn."""

    @abstractmethod
    def encoded_prompts(self) -> list[list[int]]:
        """Ids of the settings' sample prompts. Raises ConfigError for one that does not fit."""

    @abstractmethod
    def completed(self, model: Any, prompts: list[list[int]]) -> list[str]:
        """What the model makes of each of these prompts, as text."""

    def callbacks(self) -> list[Callback]:
        """See `Task`: the sample prompts are completed, so that one sees what is learned."""
        prompts = self.encoded_prompts()

        def sample(context: CallbackContext) -> None:
            found = self.completed(context.model, prompts)
            for text, said in zip(self.config.sample_prompts, found, strict=True):
                context.say(f"step {context.step}: {text}{said}")

        return [Callback(sample, every_steps=self.config.sample_every)] if prompts else []

    def where(self, step: int) -> str:
        rows = ", ".join(map(str, self.plan.rows_of(step)))
        return f"rows {rows} of {self.file.path}"

    def evaluate(self, model: Decoder | Encoder, pool: MicrobatchPool, *, whole: bool) -> Evaluation | None:
        """See `Objective`: between steps about the first `eval_tokens` tokens, and no other lengths of rows."""
        if self.held_rows is None:
            return None
        found = evaluate(model, self.held_rows, limit=None if whole else self.config.eval_tokens, pool=pool)
        measures: dict[str, float] = {}
        for length, rows in self.held_rows_of.items() if whole else ():
            other = evaluate(model, rows, pool=pool)
            named = {"loss": other.loss, "bits_per_byte": other.bits_per_byte, "accuracy": other.accuracy}
            measures |= {f"{name}@{length}": value for name, value in named.items() if value is not None}
        return replace(found, metrics=measures)
