"""Training on text: of decoders to predict every token from those before it, and of encoders to predict masked tokens
from those on both sides."""

import math
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from headway.checkpoints.restore import as_decoder
from headway.data import MaskedRows, Masking, Rows, TokenFile
from headway.data.masking import SHARE
from headway.errors import ConfigError
from headway.generate import GenerationConfig, Sampling, generate
from headway.models import Decoder, Encoder, ModelSpec
from headway.text import Tokenizer
from headway.train.callbacks import Callback, CallbackContext
from headway.train.evaluation import Evaluation, evaluate
from headway.train.inputs import TOKENS
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.rows_config import TextConfig
from headway.train.tasks.base import BYTES_PER_TOKEN, Foreseen, StepStats
from headway.train.tasks.rows import RowsTask
from headway.train.texts import prepare


class TextTask(RowsTask):
    """Base class of tasks on the tokens of a text. A subclass says which models it trains, and on which tokens."""

    settings = TextConfig
    measured_by = ("data", "context", "mask_share", "whole_words", "pack")
    by_token = True
    config: TextConfig
    in_template: ClassVar[bool]
    """Whether the token file contains the template's tokens at the begin and end of each document."""

    def prepare(self, start: Path | None) -> None:
        config, spec = self.config, self.inputs.spec()
        tokenizer, train, validation, self.remarks = prepare(self.inputs, start, in_template=self.in_template)
        model, _ = self.inputs.first_model(tokenizer.vocab_size)
        self.held_rows = None if validation is None else self.rows(validation, tokenizer, spec)
        self.begin(model, tokenizer, self.rows(train, tokenizer, spec))
        self.data, self.file = train.described(), train
        self.held_rows_of: dict[int, Rows | MaskedRows] = {}
        for length in config.eval_contexts:
            if validation is None:
                raise ConfigError("eval_contexts needs held-out data; give validation or validation_share")
            self.check(spec, length)
            self.held_rows_of[length] = self.rows(validation, tokenizer, spec, length)

    def foresee(self) -> Foreseen:
        """See `Task`: exact for token files, else estimated from the size of the text."""
        config, tokenizer, path = self.config, self.inputs.tokenizer, Path(self.config.data)
        spec = self.inputs.spec(None if tokenizer is None else tokenizer.vocab_size)
        file = TokenFile(path) if path.suffix == TOKENS else None
        if file is not None:
            tokens = len(file)
        else:
            files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
            size = sum(p.stat().st_size for p in files) * (1.0 - config.validation_share)
            tokens = max(2, int(size / BYTES_PER_TOKEN))
        rows = -(-tokens // config.context)
        if file is not None and tokenizer is not None:
            rows = len(self.rows(file, tokenizer, spec))
        return self.foreseen(spec, {"training tokens": tokens}, rows, exact=file is not None)

    @property
    def held_steps(self) -> float:
        """See `Task`: counts the held-out rows of all lengths."""
        further = sum(len(rows) * length for length, rows in self.held_rows_of.items())
        return super().held_steps + further / self.config.context / self.config.rows_per_step

    @abstractmethod
    def rows(
        self, file: TokenFile, tokenizer: Tokenizer, spec: ModelSpec, length: int | None = None
    ) -> Rows | MaskedRows:
        """Returns the rows of a token file, of `length` tokens [default: `context`]; random choices in them, if any,
        are those of held-out data (`HELD_OUT`)."""

    @abstractmethod
    def encoded_prompt(self, text: str) -> list[int]:
        """Returns the ids of a sample prompt. Raises ConfigError if it does not fit the context."""

    @abstractmethod
    def completed(self, model: Any, prompts: list[list[int]]) -> list[str]:
        """Returns the model's completion of each of these prompts, as text."""

    def callbacks(self) -> list[Callback]:
        """See `Task`: completes the sample prompts and prints the results."""
        prompts = [self.encoded_prompt(text) for text in self.config.sample_prompts]

        def sample(context: CallbackContext) -> None:
            completions = self.completed(context.model, prompts)
            for text, completion in zip(self.config.sample_prompts, completions, strict=True):
                context.say(f"step {context.step}: {text}{completion}")

        return [Callback(sample, every_steps=self.config.sample_every)] if prompts else []

    def where(self, step: int) -> str:
        rows = ", ".join(map(str, self.plan.rows_of(step)))
        return f"rows {rows} of {self.file.path}"

    def evaluate(self, model: Decoder | Encoder, pool: MicrobatchPool, *, whole: bool) -> Evaluation | None:
        """See `Objective`: between steps only on the first `eval_tokens` tokens, and without the further row lengths
        of `eval_contexts`."""
        if self.held_rows is None:
            return None
        measured = evaluate(
            model, self.held_rows, limit=None if whole else self.config.eval_tokens, pool=pool
        )
        measures: dict[str, float] = {}
        for length, rows in self.held_rows_of.items() if whole else ():
            other = evaluate(model, rows, pool=pool)
            named = {
                "loss": other.loss,
                "bits_per_byte": other.bits_per_byte,
                "accuracy": other.accuracy,
            }
            measures |= {f"{name}@{length}": value for name, value in named.items() if value is not None}
        return replace(measured, metrics=measures)


class CausalLM(TextTask):
    """The task of predicting the next token. Every token but the first of each document is predicted once per epoch, so
    that the loss can be stated in bits per byte."""

    trains = "decoder"
    next_command = "headway generate {model} '...'"
    in_template = True

    def check(self, spec: ModelSpec, context: int) -> None:
        super().check(spec, context)
        wrong = [n for n in ("mask_share", "whole_words", "pack") if getattr(self.config, n) is not None]
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)}: only for masked-lm, but {spec.family} is a decoder; leave out"
            )

    def rows(self, file: TokenFile, tokenizer: Tokenizer, spec: ModelSpec, length: int | None = None) -> Rows:
        return Rows(file, length or self.config.context)

    def encoded_prompt(self, text: str) -> list[int]:
        config, ids = self.config, self.tokenizer.encode(text, eos=False)
        if not ids or len(ids) + config.sample_tokens > config.context:
            raise ConfigError(
                f"sample prompt {text!r} of {len(ids)} tokens and sample_tokens {config.sample_tokens} do not fit "
                f"context {config.context} (at least one token is needed); shorten one of them"
            )
        return ids

    def completed(self, model: Any, prompts: list[list[int]]) -> list[str]:
        """See `TextTask`: the greedy continuation: without sampling, only the model changes between two calls."""
        eos = () if self.tokenizer.eos is None else (self.tokenizer.eos,)
        greedy, most = Sampling(temperature=0.0), self.config.sample_tokens
        settings = GenerationConfig(max_new_tokens=most, sampling=greedy, eos=eos)
        generations = generate(as_decoder(model), prompts, settings, tokenizer=self.tokenizer)
        return [f"|{continued.text}" for continued in generations]

    def quality(self, stats: StepStats) -> dict[str, float | None]:
        """See `RowsTask`: bits per byte, from the loss and the mean number of bytes per token of the training text."""
        file = self.file
        bytes_per_token = file.text_bytes / max(1, len(file) - file.documents)
        known = stats.loss is not None and bytes_per_token
        return {"bits_per_byte": (stats.loss or 0.0) / math.log(2) / bytes_per_token if known else None}


class MaskedLM(TextTask):
    """The task of predicting masked tokens (Devlin et al. 2019, section 3.1).

    Each step has new masks, drawn by (seed, step, row); held-out text always has the same, drawn by (seed, row). If the
    model has separate projections for global tokens, each text's first token ([CLS]) is global, as in classification
    (Beltagy et al. 2020, section 3.1): otherwise these projections would never be trained.
    """

    trains = "encoder"
    next_command = "headway eval {model} --data ..."
    in_template = False

    @classmethod
    def unsupported(cls, spec: ModelSpec) -> str | None:
        reason = super().unsupported(spec)
        if reason is None and spec.head.task != "masked-lm":
            return (
                f"this encoder ({spec.family}) has the head {spec.head.task!r}; pre-training needs a folder with a "
                "masked-lm head"
            )
        return reason

    def rows(
        self, file: TokenFile, tokenizer: Tokenizer, spec: ModelSpec, length: int | None = None
    ) -> MaskedRows:
        config, template = self.config, tokenizer.template
        share = SHARE if config.mask_share is None else config.mask_share
        masking = Masking.of(tokenizer, share=share, whole_words=bool(config.whole_words))
        return MaskedRows(
            file, length or config.context, masking, prefix=template.prefix, suffix=template.suffix,
            packed=config.pack is not False, seed=config.seed, global_first=spec.global_projections,
        )  # fmt: skip

    def encoded_prompt(self, text: str) -> list[int]:
        context, mask = self.config.context, self.tokenizer.need("mask")
        ids = self.tokenizer.encode(text, special=True)
        if mask not in ids or len(ids) > context:
            raise ConfigError(
                f"sample prompt {text!r} of {len(ids)} tokens must contain the mask token "
                f"({self.tokenizer.token(mask)}) and fit context {context}"
            )
        return ids

    def completed(self, model: Any, prompts: list[list[int]]) -> list[str]:
        """See `TextTask`: each mask is replaced by the most probable token."""
        mask, texts = self.tokenizer.need("mask"), []
        for row in map(torch.tensor, prompts):
            best = model(row[None])[0].argmax(-1)
            texts.append(self.tokenizer.decode(torch.where(row == mask, best, row).tolist()))
        return [f" -> {text}" for text in texts]
