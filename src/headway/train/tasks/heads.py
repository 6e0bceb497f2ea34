"""Common parts of training the head of an encoder, whichever it is: records as rows, a head for them, measures.

Legend: B rows of a batch, T slots.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.data import Batch
from headway.data.encoded import encoder_inputs, shortened, without_places
from headway.data.rows import in_slots
from headway.errors import DataError
from headway.metrics import Confusion
from headway.models import Decoder, Encoder, Head, ModelSpec
from headway.text import Encoded, Tokenizer
from headway.text.tokenizer import Text
from headway.train.config import setting
from headway.train.evaluation import Evaluation, measured
from headway.train.microbatch_pool import ALONE, MicrobatchPool
from headway.train.rows_config import ExamplesConfig
from headway.train.tasks.base import MicroBatches, Sums, cut
from headway.train.tasks.records import RecordRows, RecordsTask

EVALUATION_SLOTS = 16384  # of one forward pass, padding included
ENCODED_AT_ONCE = 512


class HeadConfig(ExamplesConfig):
    """Settings of a run that trains the head of an encoder, and the encoder with it. The optimizer's are those of
    Devlin et al. 2019, appendix A.3; a model from scratch needs a larger `lr`.

    data: records: .jsonl, .json, .csv, .tsv, or .gz of them
    validation: held-out records, of the same kinds
    model: a Hugging Face folder to start from: what stands below its head is kept, and the head too where it
        is of this task and these labels; or a name of the catalog (fresh weights) [default: a model made by
        `family` and `depth`]
    context: most tokens of a row
    batch: records of one optimizer step
    too_long: what becomes of a text of more than `context` tokens: windows reads it in parts, cut reads its
        beginning; how many there are is said
    """

    usual: ClassVar = {"lr": 5e-5, "warmup": 0.1, "lr_floor": 0.0, "weight_decay": 0.01, "beta2": 0.999}

    too_long: Literal["windows", "cut", "error"] = setting("windows", group="Batch")


class WholeConfig(HeadConfig):
    """Settings of a run whose rows have a whole text each.

    too_long: what becomes of a text of more than `context` tokens: cut reads its beginning (of a pair, the
        longer one is cut first), and how many there are is said
    """

    too_long: Literal["cut", "error"] = setting("error", group="Batch")


class HeadRows(RecordRows):
    """Rows for a head: a text each, for a model of `spec`."""

    texts: Sequence[Encoded]
    spec: ModelSpec

    @cached_property
    def lengths(self) -> list[int]:
        """The tokens of each row."""
        return [len(text.ids) for text in self.texts]

    def inputs(self, indices: Sequence[int]) -> dict[str, Any]:
        """The model's inputs for the texts of these numbers."""
        return encoder_inputs([self.texts[i] for i in indices], self.spec)

    def __len__(self) -> int:
        return len(self.lengths)

    def count(self, batch: Batch) -> int:
        """The number of terms in the loss of a batch: rows unless overridden."""
        return len(batch.targets)

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> Batch:
        """The given rows."""

    def loss(self, outputs: Tensor, batch: Batch) -> Sums:
        """The loss of the head's outputs for a batch: -log softmax(outputs)[class], unless overridden."""
        total = F.cross_entropy(outputs.flatten(0, -2), batch.targets.flatten(), reduction="sum")
        return Sums(total, total.detach(), {"hits": int((outputs.argmax(-1) == batch.targets).sum())})

    def predicted(self, outputs: Tensor, batch: Batch) -> Sequence[Any]:
        """The predictions for the rows of a batch, from the head's outputs, which `scores` takes: class or classes,
        unless overridden."""
        classes: list[Any] = outputs.argmax(-1).tolist()
        return classes

    @abstractmethod
    def scores(self, predictions: Sequence[Any]) -> dict[str, float]:
        """The measures of the predictions of all rows, by name."""

    def confusion(self, predictions: Sequence[Any]) -> Confusion | None:
        """The confusion matrix of the predictions of all rows; None where they are not of classes."""
        return None

    def evaluate(self, model: Any, pool: MicrobatchPool = ALONE) -> Evaluation:

        def run(indices: list[int]) -> tuple[list[int], float, int, Sequence[Any]]:
            batch = self.batch(indices)
            out = outputs(model, batch)
            return indices, float(self.loss(out, batch).loss), self.count(batch), self.predicted(out, batch)

        total, count, predictions = 0.0, 0, dict[int, Any]()
        alike = sorted(range(len(self)), key=self.lengths.__getitem__)  # rows of like length together
        parts, seconds = measured(model, run, in_slots(alike, self.lengths, EVALUATION_SLOTS), pool)
        for indices, loss, n, predicted in parts:
            total, count = total + loss, count + n
            predictions.update(zip(indices, predicted, strict=True))
        each = [predictions[i] for i in range(len(self))]
        scores, confusion = self.scores(each), self.confusion(each)
        return Evaluation(total, count, seconds=seconds, metrics=scores, unit=self.unit, confusion=confusion)


class HeadTask(RecordsTask):
    """The head of an encoder on records, and the encoder with it.

    A text is padded to the longest of its micro batch, and a step's rows are put into micro batches by length. Labels,
    and so on, that held-out records have beyond those of training are an error. Losses are in nats per record where
    they are of likelihoods. Of every other measure more must be better.
    """

    settings: ClassVar[type[HeadConfig]]
    measured_by = (*RecordsTask.measured_by, "too_long")
    trains, masked = "encoder", True
    config: HeadConfig
    train_rows: HeadRows

    @abstractmethod
    def head(self, records: Sequence[Any], spec: ModelSpec) -> Head: ...

    def batches(self, step: int) -> Sequence[Any]:
        """See `Objective`: the step's rows, the shortest first."""
        rows = sorted(self.plan.rows_of(step), key=lambda i: self.train_rows.lengths[i])
        return MicroBatches(self.train_rows.batch, cut(rows, self.plan.micro_batch))

    def count(self, batch: Batch) -> int:
        return self.train_rows.count(batch)

    def sums(self, model: Decoder | Encoder, batch: Batch) -> Sums:
        return self.train_rows.loss(outputs(model, batch), batch)


def outputs(model: Any, batch: Batch) -> Tensor:
    """The outputs of a model's head for a batch, in float32 or better."""
    output: Tensor = model(**batch.inputs)
    return output.to(torch.promote_types(output.dtype, torch.float32))


def encoded_whole(
    tokenizer: Tokenizer, texts: Iterable[tuple[Text, str]], config: HeadConfig
) -> Iterator[Encoded]:
    """The texts, each with its file and line, within the tokenizer's template. Raises DataError for one of more than
    `context` tokens where `too_long` is "error"."""
    for chunk in cut([*texts], ENCODED_AT_ONCE):
        read = tokenizer.inputs([text for text, _ in chunk])
        for encoding, (_, where) in zip(read, chunk, strict=True):
            if len(encoding.ids) > config.context and config.too_long == "error":
                raise DataError(
                    f"{where}: {len(encoding.ids)} tokens, and context is {config.context}; raise context, or read the "
                    "beginnings of such texts (too_long=cut)"
                )
            yield encoding


def encoded(
    tokenizer: Tokenizer, texts: Iterable[tuple[Text, str]], config: HeadConfig
) -> tuple[list[Encoded], list[str]]:
    """The texts as they are read, cut to `context` tokens and without places; and remarks. Raises as `encoded_whole`
    does."""
    read: list[Encoded] = []
    long = 0
    for text in encoded_whole(tokenizer, texts, config):
        long += len(text.ids) > config.context
        read.append(without_places(shortened(text, config.context)))
    return read, [f"{long} of {len(read)} texts are cut to {config.context} tokens"] if long else []
