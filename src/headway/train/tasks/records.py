"""Common parts of training on records, for all tasks: reading them, splitting off held-out ones, measuring."""

import hashlib
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from headway.data import Permutation
from headway.data.record_kinds import Record
from headway.data.records import read_records
from headway.data.rows import RowSource
from headway.errors import ConfigError, DataError
from headway.models import Head, ModelSpec
from headway.text import Tokenizer
from headway.train.evaluation import Evaluation
from headway.train.microbatch_pool import ALONE, MicrobatchPool
from headway.train.rows_config import RowsConfig
from headway.train.tasks.base import Foreseen
from headway.train.tasks.rows import RowsTask


class Reading(NamedTuple):
    """The context in which records are turned into rows.

    tokenizer   tokenizer of the model
    spec        spec of the model
    stop        ids that end an answer of a conversation
    generation  content of the model's generation_config.json; None if it has none
    scored      whether the rows will be evaluated; if not, data that only scores need is left out
    measured    the model that is measured, if none is trained; else None
    """

    tokenizer: Tokenizer
    spec: ModelSpec
    stop: Collection[int] = ()
    generation: Mapping[str, Any] | None = None
    scored: bool = True
    measured: Any = None


class RecordRows(RowSource):
    """Rows of a model's inputs and targets for records, on which a model can be evaluated.

    Attributes:
        unit: name of what the loss is a sum over. remarks: lines on records that were shortened or left out.
        amount: amount of data by unit, for a dry run. one_each: whether each record is exactly one row.
    """

    unit: ClassVar[str] = "record"
    one_each: ClassVar[bool] = False
    remarks: Sequence[str] = ()
    amount: Mapping[str, int] = {}

    @abstractmethod
    def __init__(self, records: Sequence[Any], config: Any, reading: Reading) -> None:
        """Encodes the records. Raises DataError, with file and line, for a record that does not fit."""

    @abstractmethod
    def evaluate(self, model: Any, pool: MicrobatchPool = ALONE) -> Evaluation:
        """Computes loss and scores of a model on all rows, in evaluation mode; `pool` computes batches in parallel."""


class RecordsTask(RowsTask):
    """Base class of tasks on rows of records.

    Attributes:
        rows: class of the rows. kinds: kinds of records to train on. measured: kinds of records to evaluate on; `kinds`
            if empty. masked: whether a newly trained tokenizer has a mask token, and ends its texts with EOS.
        head_task: the task of the head that it trains (`Head.task`); None if it has no head of its own.
    """

    rows: ClassVar[type[RecordRows]]
    kinds: ClassVar[tuple[type[Record], ...]]
    measured: ClassVar[tuple[type[Record], ...]] = ()
    masked: ClassVar[bool] = False
    head_task: ClassVar[str | None] = None
    train_rows: Any

    def prepare(self, start: Path | None) -> None:
        config, inputs = self.config, self.inputs
        train, held, remarks = split(config, self.kinds, self.measured or self.kinds)
        head = self.head(train, inputs.spec())
        tokenizer = inputs.find_tokenizer(start, lambda: self.texts(train), masked=self.masked)
        model, fresh = inputs.first_model(tokenizer.vocab_size, head)
        reading = self.reading(train, tokenizer, model.spec)
        rows = self.rows(train, config, reading._replace(scored=False))
        self.held_rows = None if held is None else self.rows(held, config, reading)
        self.begin(model, reading.tokenizer, rows)
        self.generation, self.unit, self.data = reading.generation, rows.unit, described(train)
        row_sets = {"training": rows, "held out": self.held_rows}
        notes = [
            f"{name}: {line}"
            for name, source in row_sets.items()
            if source is not None
            for line in source.remarks
        ]
        self.remarks = [*remarks, *fresh, *notes]

    def foresee(self) -> Foreseen:
        """See `Task`: exact if there is a tokenizer, or if each record is a row."""
        tokenizer = self.inputs.tokenizer
        train, _, _ = split(self.config, self.kinds, self.measured or self.kinds)
        spec = self.inputs.spec(None if tokenizer is None else tokenizer.vocab_size)
        head, exact = self.head(train, spec), tokenizer is not None or self.rows.one_each
        spec = spec if head is None else spec.with_head(head)
        if tokenizer is None:
            data, count = self.estimated(train)
        else:
            rows = self.rows(train, self.config, self.reading(train, tokenizer, spec)._replace(scored=False))
            data, count = {**rows.amount}, len(rows)
        data = {"training records": len(train), **data}
        return self.foreseen(spec, data, count, exact=exact)

    def estimated(self, records: Sequence[Any]) -> tuple[dict[str, int], int]:
        """Returns the estimated amount of data by unit, and number of rows, without a tokenizer."""
        return {}, len(records)

    def head(self, records: Sequence[Any], spec: ModelSpec) -> Head | None:
        """Returns the head for these records on a model of this spec: the model's own if it fits. None if the task
        keeps the model's head in any case."""
        return None

    @classmethod
    @abstractmethod
    def texts(cls, records: Sequence[Any]) -> Iterator[str]:
        """Returns all texts of the records, for training a tokenizer."""

    def reading(self, records: Sequence[Any], tokenizer: Tokenizer, spec: ModelSpec) -> Reading:
        """Returns the context in which these records are turned into rows."""
        return Reading(tokenizer, spec)

    def measure(
        self, model: Any, pool: MicrobatchPool, limit: int | None = None
    ) -> tuple[Evaluation, Sequence[str]]:
        config, tokenizer, task = self.config, self.inputs.tokenizer, model.spec.head.task
        if self.head_task not in (None, task):
            raise ConfigError(
                f"task {config.task} needs a model with the head {self.head_task!r}, but this one has {task!r}; leave "
                "--task out, or choose another model"
            )
        assert tokenizer is not None, "what is measured is a folder"
        records, remarks = measured_records(config, self.measured or self.kinds, limit)
        reading = self.reading(records, tokenizer, model.spec)
        rows = self.rows(records, config, reading._replace(measured=model))
        return rows.evaluate(model, pool), [*remarks, *rows.remarks]


BROKEN = 0.01  # share of the records that may be left out because they cannot be read

Kinds = tuple[type[Record], ...]


def split(
    config: RowsConfig, kinds: Kinds, measured: Kinds
) -> tuple[list[Record], list[Record] | None, list[str]]:
    """Returns the records to train on, the held-out ones (None if none are), and remarks. Held-out records are those of
    `validation`, or `validation_share` of `data`, at least one, drawn by `seed`. Raises as `read_all`, and DataError if
    no record is left to train on."""
    train, remarks = read_all(config.data, kinds)
    if config.validation is not None:
        held, more_remarks = read_all(config.validation, measured)
        return train, held, remarks + more_remarks
    if not config.validation_share:
        return train, None, remarks
    count = max(1, round(config.validation_share * len(train)))
    if count >= len(train):
        raise DataError(
            f"{config.data}: validation_share holds out {count} of {len(train)} records, which leaves none to train "
            "on; lower it, or give validation"
        )
    chosen = {*map(Permutation(config.seed, 0, len(train)), range(count))}
    rest = [record for i, record in enumerate(train) if i not in chosen]
    return rest, [train[i] for i in sorted(chosen)], remarks


def measured_records(
    config: RowsConfig, kinds: Kinds, limit: int | None = None
) -> tuple[list[Record], list[str]]:
    """Returns the records on which a model is measured, and remarks: all of `data`, or with `validation_share` those
    that a run with these settings holds out. If `limit` is given, that many of them, drawn by a fixed seed. Raises as
    `split`."""
    if config.validation_share:
        _, held, remarks = split(config, kinds, kinds)
        assert held is not None
    else:
        held, remarks = read_all(config.data, kinds)
    if limit is not None and limit < len(held):
        remarks = [*remarks, f"{limit} of {len(held)} records are measured, drawn by a fixed seed"]
    return [held[i] for i in sample(len(held), limit)], remarks


def sample(count: int, limit: int | None) -> list[int]:
    """Returns `limit` different numbers below `count`, in ascending order, drawn by a fixed seed; all of them without a
    limit."""
    return sorted(map(Permutation(0, 0, count), range(min(count, limit or count))))


def read_all(path: str, kinds: Kinds) -> tuple[list[Record], list[str]]:
    """Reads the records of a file; returns them, and remarks on those that could not be read and were left out. Raises
    DataError if these are more than the share `BROKEN`, or if no record is left."""
    broken: list[DataError] = []
    records = list(read_records(path, *kinds, skipped=broken.append))
    if len(broken) > BROKEN * (len(records) + len(broken)):
        raise DataError(f"{broken[0]} ({len(broken)} of {len(records) + len(broken)} records cannot be read)")
    if not records:
        raise DataError(f"{path}: no records")
    return records, [f"{path}: {len(broken)} records are left out, as {broken[0]}"] if broken else []


def described(records: Sequence[Record]) -> Mapping[str, Any]:
    """Returns a count and a digest that identify these records, their order included, but not their places in files."""
    digest = hashlib.blake2b(digest_size=8)
    for record in records:
        digest.update(repr(replace(record, where="")).encode("utf-8", "surrogatepass"))
    return {"records": len(records), "digest": digest.hexdigest()}
