"""What training the head of an encoder has in common, whichever it is: records, a head for them, batches, measures.

Legend: B rows of a batch, T slots.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from headway.data import Batch
from headway.data.encoded import shortened, without_places
from headway.errors import DataError
from headway.models import Decoder, Encoder, Head, ModelSpec
from headway.text import Encoded, Tokenizer
from headway.text.tokenizer import Text
from headway.train.head_config import HeadConfig
from headway.train.tasks.base import MicroBatches, Sums
from headway.train.tasks.head_rows import HeadRows, outputs
from headway.train.tasks.records import RecordsTask
from headway.train.tasks.rows import MEASURED_BY

ENCODED_AT_ONCE = 512


class HeadTask(RecordsTask):
    """The head of an encoder on records, and the encoder with it.

    A text is padded to the longest of its micro batch, and a step's rows are put into micro batches by length. Labels,
    and so on, that held-out records have beyond those of training are an error. Losses are in nats per record.
    """

    settings: ClassVar[type[HeadConfig]]
    measured_by: ClassVar[tuple[str, ...]] = (*MEASURED_BY, "too_long")
    masked = True
    config: HeadConfig
    train_rows: HeadRows

    @classmethod
    def unsupported(cls, spec: ModelSpec) -> str | None:
        if spec.encoder is not None or spec.causal:
            return f"{spec.family} is no encoder (bert, roformer, longformer, ... are)"
        return None

    @classmethod
    @abstractmethod
    def head(cls, config: Any, records: Sequence[Any], spec: ModelSpec) -> Head:
        """See `RecordsTask`."""

    def batches(self, step: int) -> Sequence[Any]:
        """See `Objective`: the step's rows, the shortest first."""
        rows = sorted(self.plan.rows_of(step), key=lambda i: self.train_rows.lengths[i])
        size = self.plan.micro_batch
        return MicroBatches(self.train_rows.batch, [rows[i : i + size] for i in range(0, len(rows), size)])

    def count(self, batch: Batch) -> int:
        return self.train_rows.count(batch)

    def sums(self, model: Decoder | Encoder, batch: Batch) -> Sums:
        """See `RowsTask`."""
        return self.train_rows.loss(outputs(model, batch), batch)


def encoded_whole(
    tokenizer: Tokenizer, texts: Sequence[Text], wheres: Sequence[str], config: HeadConfig
) -> Iterator[Encoded]:
    """The texts within the tokenizer's template. Raises DataError, with file and line, for one of more than `context`
    tokens where `too_long` is "error"."""
    for at in range(0, len(texts), ENCODED_AT_ONCE):
        read = tokenizer.inputs(texts[at : at + ENCODED_AT_ONCE])
        for one, where in zip(read, wheres[at : at + ENCODED_AT_ONCE], strict=True):
            if len(one.ids) > config.context and config.too_long == "error":
                raise DataError(
                    f"{where}: {len(one.ids)} tokens, and context is {config.context}; raise context, or read the "
                    "beginnings of such texts (too_long=cut)"
                )
            yield one


def encoded(
    tokenizer: Tokenizer, texts: Sequence[Text], wheres: Sequence[str], config: HeadConfig
) -> tuple[list[Encoded], list[str]]:
    """The texts as they are read, cut to `context` tokens and without places; and what is to be said of it. Raises as
    `encoded_whole` does."""
    found: list[Encoded] = []
    cut = 0
    for one in encoded_whole(tokenizer, texts, wheres, config):
        cut += len(one.ids) > config.context
        found.append(without_places(shortened(one, config.context)))
    return found, [f"{cut} of {len(texts)} texts are cut to {config.context} tokens"] if cut else []
