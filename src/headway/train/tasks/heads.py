"""Common parts of training the heads of encoders: records as rows, the head, and its measures.

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
    """Settings of a run that trains an encoder with a head. The optimizer's defaults are those of Devlin et al. 2019,
    appendix A.3; a model from scratch needs a larger `lr`.

    data: records: .jsonl, .json, .csv, .tsv, or .gz of them
    validation: held-out records, of the same kinds
    model: a Hugging Face folder to start from: all below its head is kept, and the head too if it is of this
        task and has these labels; or a name of the catalog (fresh weights) [default: a model made by
        `family` and `depth`]
    context: most tokens of a row
    batch: records of one optimizer step
    too_long: what becomes of a text of more than `context` tokens: windows reads it in parts, cut reads its
        beginning; their number is reported
    """

    usual: ClassVar = {"lr": 5e-5, "warmup": 0.1, "lr_floor": 0.0, "weight_decay": 0.01, "beta2": 0.999}

    too_long: Literal["windows", "cut", "error"] = setting("windows", group="Batch")


class WholeConfig(HeadConfig):
    """Settings of a run whose rows have a whole text each.

    too_long: what becomes of a text of more than `context` tokens: cut reads its beginning (of a pair, the
        longer one is cut first), and their number is reported
    """

    too_long: Literal["cut", "error"] = setting("error", group="Batch")


class HeadRows(RecordRows):
    """Rows with one encoded text each, for the head of a model of `spec`."""

    texts: Sequence[Encoded]
    spec: ModelSpec

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of each row."""
        return [len(text.ids) for text in self.texts]

    def inputs(self, indices: Sequence[int]) -> dict[str, Any]:
        """Returns the model's inputs for these rows."""
        return encoder_inputs([self.texts[i] for i in indices], self.spec)

    def __len__(self) -> int:
        return len(self.lengths)

    def count(self, batch: Batch) -> int:
        """Returns the number of terms in the loss of a batch: of its rows, unless overridden."""
        return len(batch.targets)

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> Batch:
        """Returns these rows as a batch."""

    def loss(self, outputs: Tensor, batch: Batch) -> Sums:
        """Computes the summed loss from the head's outputs for a batch: -log softmax(outputs)[class], unless
        overridden."""
        total = F.cross_entropy(outputs.flatten(0, -2), batch.targets.flatten(), reduction="sum")
        return Sums(total, total.detach(), {"hits": int((outputs.argmax(-1) == batch.targets).sum())})

    def predicted(self, outputs: Tensor, batch: Batch) -> Sequence[Any]:
        """Returns the predictions for the rows of a batch, as `scores` takes them, from the head's outputs: the most
        probable class or classes, unless overridden."""
        classes: list[Any] = outputs.argmax(-1).tolist()
        return classes

    @abstractmethod
    def scores(self, predictions: Sequence[Any]) -> dict[str, float]:
        """Returns measures of the predictions for all rows, by name."""

    def confusion(self, predictions: Sequence[Any]) -> Confusion | None:
        """Returns the confusion matrix of the predictions for all rows; None if they are no classes."""
        return None

    def evaluate(self, model: Any, pool: MicrobatchPool = ALONE) -> Evaluation:

        def run(indices: list[int]) -> tuple[list[int], float, int, Sequence[Any]]:
            batch = self.batch(indices)
            out = outputs(model, batch)
            return indices, float(self.loss(out, batch).loss), self.count(batch), self.predicted(out, batch)

        total, count, predictions = 0.0, 0, dict[int, Any]()
        by_length = sorted(
            range(len(self)), key=self.lengths.__getitem__
        )  # rows of similar length in one batch
        parts, seconds = measured(model, run, in_slots(by_length, self.lengths, EVALUATION_SLOTS), pool)
        for indices, loss, n, predicted in parts:
            total, count = total + loss, count + n
            predictions.update(zip(indices, predicted, strict=True))
        in_order = [predictions[i] for i in range(len(self))]
        scores, confusion = self.scores(in_order), self.confusion(in_order)
        return Evaluation(total, count, seconds=seconds, metrics=scores, unit=self.unit, confusion=confusion)


class HeadTask(RecordsTask):
    """Base class of tasks that train an encoder with a head on records.

    Texts are padded to the longest of their micro-batch, and a step's rows are sorted into micro-batches by length.
    Labels of held-out records that training does not have are an error. Losses are in nats per record if they are
    negative log-likelihoods. For all other measures, higher must be better.
    """

    settings: ClassVar[type[HeadConfig]]
    measured_by = (*RecordsTask.measured_by, "too_long")
    trains, masked = "encoder", True
    config: HeadConfig
    train_rows: HeadRows

    @abstractmethod
    def head(self, records: Sequence[Any], spec: ModelSpec) -> Head: ...

    def batches(self, step: int) -> Sequence[Any]:
        """See `Objective`: the step's rows, shortest first."""
        rows = sorted(self.plan.rows_of(step), key=lambda i: self.train_rows.lengths[i])
        return MicroBatches(self.train_rows.batch, cut(rows, self.plan.micro_batch))

    def count(self, batch: Batch) -> int:
        return self.train_rows.count(batch)

    def sums(self, model: Decoder | Encoder, batch: Batch) -> Sums:
        return self.train_rows.loss(outputs(model, batch), batch)


def outputs(model: Any, batch: Batch) -> Tensor:
    """Returns the outputs of a model's head for a batch, in float32 or higher precision."""
    output: Tensor = model(**batch.inputs)
    return output.to(torch.promote_types(output.dtype, torch.float32))


def encoded_whole(
    tokenizer: Tokenizer, texts: Iterable[tuple[Text, str]], config: HeadConfig
) -> Iterator[Encoded]:
    """Yields the encodings of texts in the tokenizer's template. `texts` are pairs of a text (or pair) and its file and
    line. Raises DataError for a text of more than `context` tokens if `too_long` is "error"."""
    for chunk in cut([*texts], ENCODED_AT_ONCE):
        encodings = tokenizer.inputs([text for text, _ in chunk])
        for encoding, (_, where) in zip(encodings, chunk, strict=True):
            if len(encoding.ids) > config.context and config.too_long == "error":
                raise DataError(
                    f"{where}: {len(encoding.ids)} tokens do not fit context {config.context}; raise context, or cut "
                    "off such texts (too_long=cut)"
                )
            yield encoding


def encoded(
    tokenizer: Tokenizer, texts: Iterable[tuple[Text, str]], config: HeadConfig
) -> tuple[list[Encoded], list[str]]:
    """Returns the encodings of texts, truncated to `context` tokens and without offsets, and remarks. Raises as
    `encoded_whole`."""
    encodings: list[Encoded] = []
    truncated = 0
    for text in encoded_whole(tokenizer, texts, config):
        truncated += len(text.ids) > config.context
        encodings.append(without_places(shortened(text, config.context)))
    return encodings, [
        f"{truncated} of {len(encodings)} texts are cut to {config.context} tokens"
    ] if truncated else []
