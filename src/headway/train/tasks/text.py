"""What training on text has in common, whichever of its tokens are predicted."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from headway.data import Batch, MaskedRows, Rows, TokenFile, rows_from
from headway.errors import ConfigError
from headway.hardware import gemm_peak, peak_rss
from headway.models import Decoder, Encoder, ModelSpec, blank, cost
from headway.text import Tokenizer
from headway.train.callbacks import Callback, CallbackContext
from headway.train.evaluation import Evaluation, evaluate
from headway.train.inputs import first_model, model_spec, prepare
from headway.train.microbatch_pool import MicrobatchPool, choose_workers
from headway.train.optimizer import Optimizer, learning_rate, parameter_groups
from headway.train.tasks.base import StepStats, Sums, Task
from headway.train.text_config import TextConfig


@dataclass(frozen=True)
class Plan:
    """Steps of a run over a corpus of `rows` rows.

    Attributes:
        rows: rows of the corpus, each read once per epoch, in an order drawn by (seed, epoch).
        rows_per_step: rows of one optimizer step.
        total_rows: rows that all steps read together; None when the clock decides.
        micro_batch: rows of one forward pass.
    """

    seed: int
    rows: int
    rows_per_step: int
    total_rows: int | None
    micro_batch: int

    @staticmethod
    def of(config: TextConfig, rows: int, workers: int = 1) -> Plan:
        """With `epochs`, the last step reads what is left of the last epoch, be it less than a full window.

        Where `micro_batch` is not given, the rows of a step are shared among `workers`."""
        per_step = config.rows_per_step
        total = config.steps * per_step if config.steps is not None else (config.epochs or 1) * rows
        limit = total if config.max_seconds is None else None
        return Plan(config.seed, rows, per_step, limit, config.micro_batch or -(-per_step // workers))

    @property
    def steps(self) -> int | None:
        """Optimizer steps; None when the clock decides."""
        return None if self.total_rows is None else -(-self.total_rows // self.rows_per_step)

    def rows_of(self, step: int) -> list[int]:
        """The rows that step `step` (from 0) reads, in order."""
        first = step * self.rows_per_step
        left = self.rows_per_step if self.total_rows is None else self.total_rows - first
        count = min(self.rows_per_step, left)
        assert count > 0, f"step {step} lies behind the last one"
        return rows_from(self.seed, first, count, self.rows)

    def micro_batches(self, step: int) -> list[list[int]]:
        """The same rows, cut into forward passes."""
        rows = self.rows_of(step)
        return [rows[i : i + self.micro_batch] for i in range(0, len(rows), self.micro_batch)]

    def epoch(self, step: int) -> float:
        """Passes over the data after `step` steps."""
        read = step * self.rows_per_step
        return (read if self.total_rows is None else min(read, self.total_rows)) / self.rows


class TextTask(Task[Decoder | Encoder]):
    """Rows of tokens of a text. A kind of it says which models it trains, and which tokens of a row are predicted."""

    settings = TextConfig
    in_template: ClassVar[bool]
    """Whether the documents of the token file begin and end as the tokenizer's template says."""

    def __init__(self, config: TextConfig, folder: Path, start: Path | None, dtype: torch.dtype) -> None:
        self.config = config
        spec = model_spec(config)
        self.check(config, spec)  # before a tokenizer is trained
        self.tokenizer, train, validation = prepare(config, folder, start, in_template=self.in_template)
        self.train_rows = self.rows(train, config, self.tokenizer, spec)
        self.held_rows = None if validation is None else self.rows(validation, config, self.tokenizer, spec)
        self.model = first_model(config, self.tokenizer.vocab_size)
        self.tokenizer.require_fits(self.model.spec.vocab)
        self.model.gradient_checkpointing = config.gradient_checkpointing
        self.workers = int(choose_workers(config, self.model.spec, dtype).what)
        self.plan = Plan.of(config, len(self.train_rows), self.workers)
        self.steps, self.micro_batch = self.plan.steps, self.plan.micro_batch
        self.data = train.described()
        self.flops, self.peak = cost.train_flops(self.model.spec, config.context), gemm_peak(dtype)

    @classmethod
    @abstractmethod
    def unsupported(cls, spec: ModelSpec) -> str | None:
        """Why this does not train a model; None where it does."""

    @classmethod
    def check(cls, config: TextConfig, spec: ModelSpec) -> None:
        """ConfigError for a model that this does not train, and for settings that do not fit it."""
        if (reason := cls.unsupported(spec)) is not None:
            raise ConfigError(
                f"task {config.task} was asked for, but {reason}; leave task out, or choose another family or model"
            )
        limit = spec.context_limit
        if limit is not None and config.context > limit:
            raise ConfigError(
                f"context {config.context} is more than the {limit} tokens that {config.model or spec.family} can "
                "take; lower context, or choose positions without a table (roformer, llama)"
            )
        with torch.device("meta"):
            blank(spec, backend=config.backend)

    @classmethod
    @abstractmethod
    def rows(
        cls, file: TokenFile, config: TextConfig, tokenizer: Tokenizer, spec: ModelSpec
    ) -> Rows | MaskedRows:
        """Rows of `config.context` tokens of a token file; as they are when held-out text is measured, where something
        in them is drawn."""

    @abstractmethod
    def quality(self, stats: StepStats) -> dict[str, float | None]:
        """How good a step's predictions were, besides their loss."""

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

    def optimizer(self, pool: MicrobatchPool) -> Optimizer:
        """See `Task`: AdamW, or Muon for the matrices."""
        return Optimizer.of(parameter_groups(self.model), self.config, pool)

    def schedule(self, step: int, seconds: float) -> float:
        """See `Task`: warm-up and cosine over the steps, or over the time where the clock ends the run."""
        share = (
            (step + 1) / self.steps if self.steps is not None else seconds / (self.config.max_seconds or 1)
        )
        return learning_rate(share, warmup=self.config.warmup, floor=self.config.lr_floor)

    def batches(self, step: int) -> Sequence[Batch]:
        rows = self.train_rows.drawn(step)
        return [rows.batch(part) for part in self.plan.micro_batches(step)]

    def loss(self, model: Decoder | Encoder, batch: Batch) -> Sums:
        """See `Objective`; and tokens that are read."""
        found, tokens = super().loss(model, batch), batch.inputs["tokens"]
        return found._replace(
            extra={**found.extra, "read": int(tokens.valid.expand(batch.targets.shape).sum())}
        )

    def epoch(self, steps: int) -> float:
        return self.plan.epoch(steps)

    def where(self, step: int) -> str:
        rows = ", ".join(map(str, self.plan.rows_of(step)))
        return f"rows {rows} of {self.train_rows.file.path}"

    def metrics(self, stats: StepStats) -> dict[str, Any]:
        """See `Objective`: tokens that are read count as speed, whether they are predicted or not."""
        rate = stats.extra.get("read", 0) / stats.seconds
        return {
            **self.quality(stats),
            "tokens_per_s": rate,
            "peak_memory_bytes": peak_rss(),
            "share_of_gemm_peak": rate * self.flops / self.peak,
        }

    def evaluate(self, model: Decoder | Encoder, pool: MicrobatchPool, *, last: bool) -> Evaluation | None:
        """See `Objective`: during the run about the first `eval_tokens` tokens, at its end all."""
        if self.held_rows is None:
            return None
        return evaluate(model, self.held_rows, limit=None if last else self.config.eval_tokens, pool=pool)
