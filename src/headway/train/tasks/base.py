"""The interface of objectives for a trainer, of tasks for a run, and the plan of the rows that steps read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple

from torch import Tensor

from headway.checkpoints import Base
from headway.choice import Choice
from headway.data import rows_from
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.nn import IGNORE_INDEX
from headway.text import Tokenizer
from headway.train.callbacks import Callback
from headway.train.config import TrainConfig
from headway.train.evaluation import Evaluation
from headway.train.inputs import Inputs
from headway.train.microbatch_pool import M, MicrobatchPool, T
from headway.train.optimizer import Optimizer
from headway.train.rows_config import RowsConfig


class Sums(NamedTuple):
    """The loss over the targets of a batch.

    total   scalar, differentiable: the summed loss that is minimised
    loss    scalar without gradient: the sum that is reported
    extra   further sums by name, such as hits; they are added up over the micro batches of a step
    """

    total: Tensor
    loss: Tensor
    extra: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class StepStats:
    """Statistics of one optimizer step.

    loss_sum    sum over all its micro batches; count: number of their targets
    grad_norm   before clipping
    lr          learning rate of the optimizer's first part
    seconds     time that the step took
    extra       sums of `Sums.extra`
    """

    loss_sum: float
    count: int
    grad_norm: float
    lr: float
    seconds: float
    extra: Mapping[str, float]

    @property
    def loss(self) -> float | None:
        """The loss per target; None where there was none, and no step was made."""
        return self.loss_sum / self.count if self.count else None


def cut(rows: Sequence[T], size: int) -> list[Sequence[T]]:
    """The rows in parts of `size`; the last part may be shorter."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


class MicroBatches(Sequence[Any]):
    """`make(part)` of each part, made when it is asked for: a process makes its own only."""

    def __init__(self, make: Callable[[Any], Any], parts: Sequence[Any]) -> None:
        self.make, self.parts = make, parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, at: Any) -> Any:
        return [*map(self.make, self.parts[at])] if isinstance(at, slice) else self.make(self.parts[at])


class Objective(ABC, Generic[M]):
    """The objective that a `Trainer` minimises: the sum of `loss` over the micro batches of a step, divided by the sum
    of `count`.

    `batches` is all that training in memory needs (`headway.train.trainer.fit`), where batches are
    `headway.data.Batch`; others need a `count` and a `loss` of their own.
    """

    @abstractmethod
    def batches(self, step: int) -> Sequence[Any]:
        """The micro batches of step 0, 1, ..: a pure function of seed and step, so that a resumed run needs no more
        than the number of steps that are done. Each is asked for once, by the process that computes it."""

    def count(self, batch: Any) -> int:
        """Targets of a batch, by which the summed loss is divided."""
        return int((batch.targets != IGNORE_INDEX).sum())

    def loss(self, model: M, batch: Any) -> Sums:
        """The summed loss of a batch."""
        output = model(**batch.inputs, targets=batch.targets)
        return Sums(
            output.total, output.nats, {} if output.hits is None else {"hits": int(output.hits.sum())}
        )

    def epoch(self, steps: int) -> float | None:
        """Passes over the data after `steps` steps; None where data does not come in passes."""
        return None

    def metrics(self, stats: StepStats) -> Mapping[str, Any]:
        """Further entries of a step's line in metrics.jsonl."""
        return {}

    def where(self, step: int) -> str:
        """A text for errors: the data that step `step` reads."""
        return f"the batches of step {step + 1}"

    def evaluate(self, model: M, pool: MicrobatchPool, *, whole: bool) -> Evaluation | None:
        """Measure on held-out data, if there is any: the `whole` of it before the first step and after the last."""
        return None


class Foreseen(NamedTuple):
    """The work of a run, as far as that is known before a tokenizer is trained and anything is computed.

    spec      of its model
    data      amount of training data by its unit: {"records": 120}; counted where `exact`, else estimated
    plan      rows and steps
    context   most tokens of a row
    texts     rows of tokens that each row of the plan has: 2 for a pair of answers
    workers   forward passes that run side by side
    """

    spec: ModelSpec
    data: Mapping[str, int]
    exact: bool
    plan: "Plan"
    context: int
    workers: Choice
    texts: int = 1


KINDS = {
    "decoder": ("llama, qwen3, gpt2", "a decoder, trained on next tokens"),
    "encoder": ("bert, roformer, longformer", "an encoder, trained on masked tokens"),
    "encoder-decoder": ("transformer, marian", "an encoder-decoder, trained on pairs of texts"),
}
"""Kinds of models: families of each, and a description."""


class Task(Objective[M]):
    """An objective that `headway train` runs in a folder, made from its settings.

    Attributes:
        settings: the class of its settings. measured_by: those that `measure` uses.
        trains: the kind of models that it is for (`ModelSpec.kind`); None for any.
        next_command: a command to type when the run is done; `{model}` is its folder.
        inputs: the settings, and what they name. config: the settings.
        model: fp32, as the run begins: fresh weights, or those of a folder.
        tokenizer: saved with the model. generation: the content of its generation_config.json.
        data: a description that tells the training data from others; compared when a run is resumed.
        steps: length of the run; None where the clock decides.
        remarks: lines that are printed when the run begins, on data that was not taken as it is, say.
        unit: name of what the loss is a mean over.
        by_token: whether it is a sum over the tokens of rows, so that these may be sharded over processes.
        base: the frozen model beside which an adapter is trained; None where the model itself is.
        workers: micro batches that run at the same time, in each process. micro_batch: rows of each; None where each
            process has one.

    `prepare` sets `model`, `tokenizer`, `data` and the attributes below them.
    """

    settings: ClassVar[type[TrainConfig]]
    measured_by: ClassVar[tuple[str, ...]] = ()
    trains: ClassVar[str | None] = None
    next_command: ClassVar[str]
    by_token: ClassVar[bool] = False
    config: Any
    model: M
    tokenizer: Tokenizer
    data: Mapping[str, Any]
    steps: int | None
    generation: Mapping[str, Any] | None = None
    remarks: Sequence[str] = ()
    unit: str = "token"
    base: Base | None = None
    workers: int = 1
    micro_batch: int | None = None

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.config = inputs, inputs.config

    @classmethod
    def unsupported(cls, spec: ModelSpec) -> str | None:
        """Why this neither trains nor measures a model; None where it does."""
        if cls.trains in (None, spec.kind):
            return None
        such, _ = KINDS[str(cls.trains)]
        return f"{spec.family} is no {cls.trains} ({such}, ... are) but {KINDS[spec.kind][1]}"

    def check_settings(self) -> None:
        """Raises ConfigError for settings that fit no run of this task, as far as that is known before data is read."""

    def foresee(self) -> Foreseen:
        """The work of a run. Raises ConfigError for a task of your own that does not say."""
        raise ConfigError(
            f"a dry run asks the task, and {type(self).__name__} has no `foresee`; leave --dry-run out"
        )

    @abstractmethod
    def prepare(self, start: Path | None) -> None:
        """Read the data (files made of it lie in the run's folder) and build the model; a run that resumes from the
        checkpoint `start` has its tokenizer.

        Raises ConfigError and DataError for settings and data that do not fit together."""

    def measure(
        self, model: Any, pool: MicrobatchPool, limit: int | None = None
    ) -> tuple[Evaluation, Sequence[str]]:
        """Evaluate a model, whose folder is that of `inputs`, on the data of the settings, or on `limit` records of it,
        as `evaluate` does held-out data; and remarks on data that was not taken as it is.

        Raises ConfigError for a model that this does not measure, DataError for data that does not fit."""
        raise ConfigError(f"{type(self).__name__} measures within its runs alone: it has no `measure`")

    @abstractmethod
    def optimizer(self, pool: MicrobatchPool) -> Optimizer:
        """The optimizer over the parameters of `model`."""

    def spread(self, ranks: int) -> None:
        """Called before the first step: so many processes share the micro batches of each, so that there should be at
        least as many. A task that cannot cut them further leaves them as they are."""

    @property
    def held_steps(self) -> float:
        """The number of steps that read as much as a whole evaluation."""
        return 0.0

    def callbacks(self) -> Sequence[Callback]:
        """Callbacks that are called before those of the caller."""
        return ()

    @abstractmethod
    def schedule(self, step: int, seconds: float) -> float:
        """Factor of the peak learning rates in step 0, 1, .. after `seconds` of training."""


BYTES_PER_TOKEN = 3.0  # of English or source text under a BPE of a few thousand entries; only for estimates


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
    def of(config: RowsConfig, rows: int, workers: int = 1) -> "Plan":
        """A plan over `rows` rows. With `epochs`, the last step reads the rest of the last epoch, full or not.

        Where `micro_batch` is not given, the rows of a step are shared among `workers`."""
        per_step = config.rows_per_step
        total = config.steps * per_step if config.steps is not None else (config.epochs or 1) * rows
        limit = total if config.max_seconds is None else None
        cut = 1 if config.in_one_pass else workers
        return Plan(config.seed, rows, per_step, limit, config.micro_batch or -(-per_step // cut))

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

    def micro_batches(self, step: int) -> list[Sequence[int]]:
        """The same rows, cut into forward passes."""
        return cut(self.rows_of(step), self.micro_batch)

    def epoch(self, step: int) -> float:
        """Passes over the data after `step` steps."""
        read = step * self.rows_per_step
        return (read if self.total_rows is None else min(read, self.total_rows)) / self.rows
