"""Common parts of training on rows of tokens, for all tasks: the order of rows, the steps, the optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from headway.choice import Choice
from headway.data.rows import RowSource
from headway.errors import ConfigError
from headway.hardware import gemm_peak, peak_rss
from headway.models import Decoder, Encoder, ModelSpec, blank, cost
from headway.text import Tokenizer
from headway.train.evaluation import Evaluation
from headway.train.inputs import trained_parameters
from headway.train.microbatch_pool import MicrobatchPool, choose_workers
from headway.train.optimizer import Optimizer, learning_rate, parameter_groups
from headway.train.rows_config import RowsConfig
from headway.train.tasks.base import Foreseen, MicroBatches, Plan, StepStats, Sums, Task


class RowsTask(Task[Decoder | Encoder]):
    """Base class of tasks on rows of tokens. A subclass creates model and rows, passes them to `begin`, and evaluates.

    Attributes:
        config: the settings. train_rows: rows to train on. plan: which of them each step reads. held_rows: held-out
            rows; None if there are none. most_texts: maximum number of token sequences in a row.
    """

    measured_by: ClassVar[tuple[str, ...]] = ("data", "context", "validation_share", "seed")
    most_texts: ClassVar[int] = 1
    config: RowsConfig
    train_rows: RowSource
    held_rows: Any = None
    plan: Plan

    def check_settings(self) -> None:
        self.check(self.inputs.spec(), self.config.context)

    def check(self, spec: ModelSpec, context: int) -> None:
        """Raises ConfigError for a model that this task does not train, and for settings that do not fit it."""
        config = self.config
        if (reason := self.unsupported(spec)) is not None:
            raise ConfigError(
                f"task {config.task}: {reason}; leave task out, or choose another family or model"
            )
        if config.adapter is not None and self.inputs.folder is None:
            raise ConfigError(
                f"adapter={config.adapter} needs the folder of a model, and model={config.model} is not a folder"
            )
        limit = spec.context_limit
        if limit is not None and context > limit:
            raise ConfigError(
                f"context {context} is more than the {limit} tokens that {config.model or spec.family} can "
                "take; lower context, or choose a family without a table of positions (roformer, llama)"
            )
        with torch.device("meta"):
            blank(spec, backend=config.backend)

    def foreseen(self, spec: ModelSpec, data: Mapping[str, int], rows: int, *, exact: bool) -> Foreseen:
        """Returns the work of a run over this number of rows, with the steps of the settings. See `Foreseen`."""
        self.check(spec, self.config.context)
        workers = self.choose_workers(spec)
        plan = Plan.of(self.config, max(1, rows), int(workers.what))
        return Foreseen(spec, data, exact, plan, self.config.context, workers, self.most_texts)

    def choose_workers(self, spec: ModelSpec) -> Choice:
        """Chooses the number of micro-batches of a step that run in parallel."""
        gradient = trained_parameters(self.config, spec) * self.inputs.dtype.itemsize
        return choose_workers(self.config, spec, gradient)

    def begin(self, model: Decoder | Encoder, tokenizer: Tokenizer, rows: RowSource) -> None:
        """Plans the steps of `model` over `rows`, and attaches an adapter if the settings have one. Raises DataError if
        the tokenizer has ids that the model lacks."""
        config, dtype = self.config, self.inputs.dtype
        tokenizer.require_fits(model.spec.vocab)
        model.gradient_checkpointing = config.gradient_checkpointing
        self.base = self.inputs.adapt(model)
        self.model, self.tokenizer, self.train_rows = model, tokenizer, rows
        self.workers = int(self.choose_workers(model.spec).what)
        self.plan = Plan.of(config, len(rows), self.workers)
        self.steps, self.micro_batch = self.plan.steps, self.plan.micro_batch
        self.flops, self.peak = cost.train_flops(model.spec, config.context), gemm_peak(dtype)

    def spread(self, ranks: int) -> None:
        """See `Task`: without the setting `micro_batch`, the workers of all processes divide the rows of a step."""
        plan = Plan.of(self.config, self.plan.rows, self.workers * ranks)
        self.plan, self.micro_batch, self.peak = plan, plan.micro_batch, self.peak * ranks

    @property
    def held_steps(self) -> float:
        return 0.0 if self.held_rows is None else len(self.held_rows) / self.config.rows_per_step

    def optimizer(self, pool: MicrobatchPool) -> Optimizer:
        """See `Task`: AdamW, or Muon for the matrices and AdamW for the rest."""
        return Optimizer.of(parameter_groups(self.model), self.config, pool)

    def schedule(self, step: int, seconds: float) -> float:
        """See `Task`: warm-up and cosine over the steps, or over the time if a time limit ends the run."""
        share = (
            (step + 1) / self.steps if self.steps is not None else seconds / (self.config.max_seconds or 1)
        )
        return learning_rate(share, warmup=self.config.warmup, floor=self.config.lr_floor)

    def batches(self, step: int) -> Sequence[Any]:
        rows = self.train_rows.drawn(step)
        return MicroBatches(rows.batch, self.plan.micro_batches(step))

    def evaluate(self, model: Decoder | Encoder, pool: MicrobatchPool, *, whole: bool) -> Evaluation | None:
        """See `Objective`: always on all held-out rows."""
        return None if self.held_rows is None else self.held_rows.evaluate(model, pool)

    def sums(self, model: Decoder | Encoder, batch: Any) -> Sums:
        """Computes the summed loss of a batch."""
        return super().loss(model, batch)

    def loss(self, model: Decoder | Encoder, batch: Any) -> Sums:
        """See `Objective`; adds the number of tokens that the model reads (`read`)."""
        sums, tokens = self.sums(model, batch), batch.inputs["tokens"]
        read = int(tokens.valid.expand(batch.inputs["ids"].shape).sum())
        return sums._replace(extra={**sums.extra, "read": read})

    def epoch(self, steps: int) -> float:
        return self.plan.epoch(steps)

    def where(self, step: int) -> str:
        rows = ", ".join(map(str, self.plan.rows_of(step)))
        return f"rows {rows} of {self.config.data}"

    def metrics(self, stats: StepStats) -> dict[str, Any]:
        """See `Objective`: speed is in tokens read, whether they are targets or not."""
        rate = stats.extra.get("read", 0) / stats.seconds
        return {
            **self.quality(stats),
            "tokens_per_s": rate,
            "peak_memory_bytes": peak_rss(),
            "share_of_gemm_peak": rate * self.flops / self.peak,
        }

    def quality(self, stats: StepStats) -> dict[str, float | None]:
        """Returns measures of a step's predictions: the accuracy, if correct ones are counted."""
        hits = stats.extra.get("hits")
        return {} if hits is None else {"accuracy": hits / stats.count}
