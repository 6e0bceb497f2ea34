"""What training the head of an encoder has in common, whichever it is: records, a head for them, batches, measures.

Legend: B rows of a batch, T slots.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from headway.checkpoints.folder import load_folder
from headway.checkpoints.restore import build_model
from headway.data import Batch
from headway.data.encoded import shortened, without_places
from headway.data.record_kinds import Record
from headway.errors import ConfigError, DataError
from headway.models import Decoder, Encoder, Head, ModelSpec, build
from headway.text import Encoded, Tokenizer
from headway.text.tokenizer import Text
from headway.train.evaluation import Evaluation
from headway.train.head_config import HeadConfig, WholeConfig
from headway.train.head_rows import HeadRows, evaluate_rows, outputs
from headway.train.inputs import find_tokenizer, make_spec, model_spec
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.records import described, measured_records, split
from headway.train.rows_config import RowsConfig
from headway.train.tasks.base import MicroBatches, StepStats, Subject, Sums
from headway.train.tasks.rows import MEASURED_BY, Amount, RowsTask

ENCODED_AT_ONCE = 512


class HeadTask(RowsTask):
    """The head of an encoder on records, and the encoder with it.

    A text is padded to the longest of its micro batch, and a step's rows are put into micro batches by length. Labels,
    and so on, that held-out records have beyond those of training are an error. Losses are in nats per record.

    Attributes:
        head_task: of the models that it trains. kinds: of the records that it reads; measured: of those that it
            measures, the same unless said. most_texts: of a row.
    """

    settings: ClassVar[type[HeadConfig]]
    measured_by: ClassVar[tuple[str, ...]] = (*MEASURED_BY, "too_long")
    head_task: ClassVar[str]
    kinds: ClassVar[tuple[type[Record], ...]]
    measured: ClassVar[tuple[type[Record], ...]] = ()
    most_texts: ClassVar[int] = 1
    config: HeadConfig
    train_rows: HeadRows

    def __init__(self, config: HeadConfig, folder: Path, start: Path | None, dtype: torch.dtype) -> None:
        self.config = config
        spec = model_spec(config)
        train, held, said = split(config, self.kinds, self.measured or self.kinds)
        head = self.head(config, train, spec)
        tokenizer = find_tokenizer(config, folder, start, lambda: self.texts(train), masked=True)
        model, fresh = headed(config, head, tokenizer.vocab_size)
        rows = self.rows(train, tokenizer, model.spec, config, scored=False)
        self.held_rows = None if held is None else self.rows(held, tokenizer, model.spec, config)
        self.begin(model, tokenizer, rows, dtype)
        self.unit = rows.unit
        self.data = described(train)
        kept = [] if self.held_rows is None else [f"held out: {remark}" for remark in self.held_rows.remarks]
        self.remarks = [*said, *fresh, *rows.remarks, *kept]

    @classmethod
    def amount(cls, config: HeadConfig, tokenizer: Tokenizer | None) -> Amount:
        """See `RowsTask`: without a tokenizer as if each record were one row."""
        spec = model_spec(config, None if tokenizer is None else tokenizer.vocab_size)
        train, _, _ = split(config, cls.kinds, cls.measured or cls.kinds)
        spec = spec.with_head(cls.head(config, train, spec))
        data = {"training records": len(train)}
        if tokenizer is None:
            return Amount(spec, data, isinstance(config, WholeConfig), len(train), cls.most_texts)
        return Amount(
            spec, data, True, len(cls.rows(train, tokenizer, spec, config, scored=False)), cls.most_texts
        )

    @classmethod
    def unsupported(cls, spec: ModelSpec) -> str | None:
        if spec.encoder is not None or spec.causal:
            return f"{spec.family} is no encoder (bert, roformer, longformer, ... are)"
        return None

    @classmethod
    @abstractmethod
    def head(cls, config: Any, records: Sequence[Any], spec: ModelSpec) -> Head:
        """The head for these records on a model of this spec: its own where that does."""

    @classmethod
    @abstractmethod
    def texts(cls, records: Sequence[Any]) -> Iterator[str]:
        """All text of the records, for a tokenizer that is to be trained."""

    @classmethod
    @abstractmethod
    def rows(
        cls,
        records: Sequence[Any],
        tokenizer: Tokenizer,
        spec: ModelSpec,
        config: Any,
        *,
        scored: bool = True,
    ) -> HeadRows:
        """The rows of the records; unless they are to be `scored`, without what only that needs. Raises DataError for
        one that does not fit, with file and line."""

    def batches(self, step: int) -> Sequence[Any]:
        """See `Objective`: the step's rows, the shortest first."""
        rows = sorted(self.plan.rows_of(step), key=lambda i: self.train_rows.lengths[i])
        size = self.plan.micro_batch
        return MicroBatches(self.train_rows.batch, [rows[i : i + size] for i in range(0, len(rows), size)])

    def count(self, batch: Batch) -> int:
        return self.train_rows.count(batch)

    def loss(self, model: Decoder | Encoder, batch: Batch) -> Sums:
        """See `Objective`; and tokens that are read."""
        found = self.train_rows.loss(outputs(model, batch), batch)
        return found._replace(extra={**found.extra, "read": int(batch.inputs["tokens"].valid.sum())})

    def quality(self, stats: StepStats) -> dict[str, float | None]:
        """See `RowsTask`: the share of the step's predictions that were right, where that is counted."""
        hits = stats.extra.get("hits")
        return {} if hits is None else {"accuracy": hits / stats.count if stats.count else None}

    def evaluate(self, model: Decoder | Encoder, pool: MicrobatchPool, *, whole: bool) -> Evaluation | None:
        """See `Objective`."""
        if self.held_rows is None:
            return None
        assert isinstance(model, Encoder)
        return evaluate_rows(model, self.held_rows, pool)

    @classmethod
    def measure(
        cls, config: HeadConfig, subject: Subject, pool: MicrobatchPool, limit: int | None = None
    ) -> tuple[Evaluation, Sequence[str]]:
        """See `Task`."""
        spec = subject.model.spec
        if spec.head.task != cls.head_task:
            raise ConfigError(
                f"task {config.task} measures a head {cls.head_task!r}, and this model has {spec.head.task!r}; leave "
                "--task out, or choose another model"
            )
        records, said = measured_records(config, cls.measured or cls.kinds, limit)
        rows = cls.rows(records, subject.tokenizer, spec, config)
        return evaluate_rows(subject.model, rows, pool), [*said, *rows.remarks]


def headed(config: RowsConfig, head: Head, vocab: int) -> tuple[Encoder, list[str]]:
    """The fp32 encoder with `head` that a run begins with, and what is to be said of it. Of a folder with another
    head, what stands below is taken; what is new is drawn from `seed`."""

    def fresh(spec: ModelSpec) -> Encoder:
        longer = _longer(spec.with_head(head), config.context)
        model = build(longer, dtype=torch.float32, seed=config.seed, backend=config.backend)
        assert isinstance(model, Encoder), "the task has checked the spec"
        return model

    if config.model is None or not Path(config.model).is_dir():
        return fresh(make_spec(config, vocab)), []
    found = load_folder(config.model)
    if found.spec.head == head:
        found = replace(found, spec=_longer(found.spec, config.context))
        model = build_model(found, dtype=torch.float32, backend=config.backend).train()
        assert isinstance(model, Encoder), "the task has checked the spec"
        return model, []
    below = build_model(load_folder(config.model, head=Head("states")), dtype=torch.float32)
    model = fresh(found.spec)
    model.load_state_dict(below.state_dict(), strict=False)  # all but the head's
    was = found.spec.head.task
    return model, [f"{config.model} has the head {was!r}; {head.task!r} is a new one, with fresh weights"]


def _longer(spec: ModelSpec, context: int) -> ModelSpec:
    """For rows of `context` tokens, which is what its users may then give it."""
    return replace(spec, trained_context=max(context, spec.trained_context))


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
