"""The interfaces of objectives (for a trainer) and of tasks (for a run), and the plan of the rows that steps read."""

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
    """Sums over the targets of a batch.

    total   differentiable scalar: the summed loss that is minimised
    loss    scalar without gradient: the summed loss that is reported
    extra   further sums by name, such as hits, which are added up over the micro-batches of a step
    """

    total: Tensor
    loss: Tensor
    extra: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class StepStats:
    """Statistics of one optimizer step.

    loss_sum    sum of the loss over all micro-batches; count: number of their targets
    grad_norm   norm of the gradient before clipping; lr: learning rate of the optimizer's first part
    seconds     duration of the step
    extra       sums of `Sums.extra` over all micro-batches
    """

    loss_sum: float
    count: int
    grad_norm: float
    lr: float
    seconds: float
    extra: Mapping[str, float]

    @property
    def loss(self) -> float | None:
        """The loss per target; None if there was no target, and weights did not change."""
        return self.loss_sum / self.count if self.count else None


def cut(rows: Sequence[T], size: int) -> list[Sequence[T]]:
    """Splits rows into parts of `size`; the last part may be shorter."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


class MicroBatches(Sequence[Any]):
    """The sequence of `make(part)` for each part, computed on access: a process only makes its own micro-batches."""

    def __init__(self, make: Callable[[Any], Any], parts: Sequence[Any]) -> None:
        self.make, self.parts = make, parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, at: Any) -> Any:
        return [*map(self.make, self.parts[at])] if isinstance(at, slice) else self.make(self.parts[at])


class Objective(ABC, Generic[M]):
    """The objective that a `Trainer` minimises: the sum of `loss` over the micro-batches of a step, divided by the sum
    of `count`.

    For training in memory (`headway.train.trainer.fit`) it is enough to define `batches`, if these are
    `headway.data.Batch`; other types of batches need their own `count` and `loss`.
    """

    @abstractmethod
    def batches(self, step: int) -> Sequence[Any]:
        """Returns the micro-batches of step 0, 1, ..: a pure function of seed and step, so that a run can be resumed
        from its number of steps. Each micro-batch is accessed once, by the process that computes it."""

    def count(self, batch: Any) -> int:
        """Returns the number of targets of a batch, by which the summed loss is divided."""
        return int((batch.targets != IGNORE_INDEX).sum())

    def loss(self, model: M, batch: Any) -> Sums:
        """Computes the summed loss of a batch."""
        output = model(**batch.inputs, targets=batch.targets)
        return Sums(
            output.total, output.nats, {} if output.hits is None else {"hits": int(output.hits.sum())}
        )

    def epoch(self, steps: int) -> float | None:
        """Returns the number of passes over the data after `steps` steps; None if there are no passes."""
        return None

    def metrics(self, stats: StepStats) -> Mapping[str, Any]:
        """Returns further entries of a step's line in metrics.jsonl."""
        return {}

    def where(self, step: int) -> str:
        """Describes the data that step `step` reads, for error messages."""
        return f"the batches of step {step + 1}"

    def evaluate(self, model: M, pool: MicrobatchPool, *, whole: bool) -> Evaluation | None:
        """Evaluates a model on held-out data; None if there is none. `whole`: on all of it, as before the first step
        and after the last; between steps a part may be used."""
        return None


class Foreseen(NamedTuple):
    """The work of a run, as far as it is known without training a tokenizer or a model.

    spec      spec of the model
    data      amount of training data by unit, {"records": 120}; counted if `exact`, else estimated
    plan      rows and steps; context: maximum number of tokens of a row
    workers   number of forward passes that run in parallel
    texts     number of token sequences in each row of the plan: 2 for a pair of answers
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
"""Kind of a model -> (some families of this kind, description)."""


class Task(Objective[M]):
    """An objective that `headway train` runs in a folder, created from its settings.

    Attributes:
        settings: its settings class. measured_by: names of the settings that `measure` uses.
        trains: the kind of models that it trains (`ModelSpec.kind`); None for any.
        next_command: a command to try when the run is done; `{model}` is the model's folder.
        inputs: the settings and the model that they name. config: the settings.
        model: the fp32 model at the beginning of the run: with fresh weights, or those of a folder.
        tokenizer: saved with the model. generation: the content of its generation_config.json; None for none.
        data: a description that identifies the training data; compared when a run is resumed.
        steps: length of the run; None if a time limit decides.
        remarks: lines that are printed when the run begins, for example on records that were left out.
        unit: name of what the loss is averaged over.
        by_token: whether the loss is a sum over the tokens of rows, so that rows may be sharded over processes (cp).
        base: the frozen model beside which an adapter is trained; None if the model itself is trained.
        workers: micro-batches that run in parallel in each process. micro_batch: rows of each; None if every process
            has a single one per step.

    `prepare` sets `model`, `tokenizer`, `data`, and the attributes listed after them.
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
        """Returns the reason why this task neither trains nor measures a model of this spec; None if it does."""
        if cls.trains in (None, spec.kind):
            return None
        families, kind = KINDS[str(cls.trains)]
        return f"{spec.family} is {KINDS[spec.kind][1]}, not {kind.partition(',')[0]} ({families}, ...)"

    def check_settings(self) -> None:
        """Raises ConfigError for settings that are not valid for this task, as far as is known before data is read."""

    def foresee(self) -> Foreseen:
        """Returns the work of a run. Raises ConfigError if a task does not implement this."""
        raise ConfigError(
            f"a dry run needs the method `foresee`, which {type(self).__name__} lacks; leave --dry-run out"
        )

    @abstractmethod
    def prepare(self, start: Path | None) -> None:
        """Reads the data (files made from it are kept in the run's folder) and builds the model. A run that resumes
        from the checkpoint `start` uses its tokenizer.

        Raises ConfigError and DataError for settings and data that do not fit together."""

    def measure(
        self, model: Any, pool: MicrobatchPool, limit: int | None = None
    ) -> tuple[Evaluation, Sequence[str]]:
        """Evaluates a trained model, whose folder is that of `inputs`, on the data of the settings, or on `limit`
        records of it, as `evaluate` does on held-out data; returns the evaluation, and remarks on the data.

        Raises ConfigError for a model that this task does not measure, DataError for data that do not fit."""
        raise ConfigError(f"eval needs the method `measure`, which task {type(self).__name__} lacks")

    @abstractmethod
    def optimizer(self, pool: MicrobatchPool) -> Optimizer:
        """Returns the optimizer of the parameters of `model`."""

    def spread(self, ranks: int) -> None:
        """Prepares for `ranks` processes that share the micro-batches of each step, of which there should then be at
        least as many. Called before the first step; a task that cannot split steps further does nothing."""

    @property
    def held_steps(self) -> float:
        """Number of steps that read as much data as an evaluation of all held-out data."""
        return 0.0

    def callbacks(self) -> Sequence[Callback]:
        """Returns the task's callbacks, which are called before those of the user."""
        return ()

    @abstractmethod
    def schedule(self, step: int, seconds: float) -> float:
        """Returns the factor of the peak learning rates for a step (0, 1, ..), after `seconds` of training."""


BYTES_PER_TOKEN = 3.0  # estimate, for English or source code under a BPE of a few thousand entries


@dataclass(frozen=True)
class Plan:
    """The plan of a run over a corpus of `rows` rows: which rows each step reads.

    Attributes:
        seed: seed of the order.
        rows: number of rows of the corpus; each is read once per epoch, in an order that depends on (seed, epoch).
        rows_per_step: number of rows of one optimizer step.
        total_rows: number of rows that all steps read together; None if a time limit decides.
        micro_batch: number of rows of one forward pass.
    """

    seed: int
    rows: int
    rows_per_step: int
    total_rows: int | None
    micro_batch: int

    @staticmethod
    def of(config: RowsConfig, rows: int, workers: int = 1) -> "Plan":
        """Returns the plan for a corpus of `rows` rows. With `epochs`, the last step reads the rest of the last epoch
        and may have fewer rows. Without the setting `micro_batch`, `workers` divide the rows of a step."""
        per_step = config.rows_per_step
        total = config.steps * per_step if config.steps is not None else (config.epochs or 1) * rows
        limit = total if config.max_seconds is None else None
        parts = 1 if config.in_one_pass else workers
        return Plan(config.seed, rows, per_step, limit, config.micro_batch or -(-per_step // parts))

    @property
    def steps(self) -> int | None:
        """Number of optimizer steps; None if a time limit decides."""
        return None if self.total_rows is None else -(-self.total_rows // self.rows_per_step)

    def rows_of(self, step: int) -> list[int]:
        """Returns the rows that step `step` (from 0) reads, in order."""
        first = step * self.rows_per_step
        left = self.rows_per_step if self.total_rows is None else self.total_rows - first
        count = min(self.rows_per_step, left)
        assert count > 0, f"step {step} lies behind the last one"
        return rows_from(self.seed, first, count, self.rows)

    def micro_batches(self, step: int) -> list[Sequence[int]]:
        """Returns the rows of a step, split into micro-batches."""
        return cut(self.rows_of(step), self.micro_batch)

    def epoch(self, step: int) -> float:
        """Returns the number of passes over the data after `step` steps."""
        read = step * self.rows_per_step
        return (read if self.total_rows is None else min(read, self.total_rows)) / self.rows
