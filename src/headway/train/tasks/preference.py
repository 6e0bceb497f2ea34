"""A better and a worse answer: direct preference optimisation, and odds ratios without a reference model.

Legend: P pairs of a batch, N pairs of a run, T slots.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from headway.data.record_kinds import Preference as Pair
from headway.data.record_kinds import Record
from headway.errors import ConfigError, DataError
from headway.models import Decoder, Encoder, ModelSpec
from headway.nn import IGNORE_INDEX
from headway.nn.preference import dpo_loss, orpo_loss
from headway.text import Tokenizer
from headway.text.segments import Segments, chat_segments
from headway.train.config import setting
from headway.train.conversations import ConversationConfig, conversation_tokenizer, message_texts
from headway.train.evaluation import Evaluation
from headway.train.inputs import find_tokenizer, first_model, model_spec
from headway.train.microbatch_pool import MasterWeights, MicrobatchPool
from headway.train.records import described, measured_records, split
from headway.train.tasks.base import StepStats, Subject, Sums
from headway.train.tasks.pairs import (
    AT_ONCE,
    PairBatch,
    PairRows,
    kept_reference,
    log_p,
    reference,
    reference_model,
)
from headway.train.tasks.rows import MEASURED_BY, Amount, RowsTask

REFERENCE = "reference.safetensors"


class PreferenceConfig(ConversationConfig):
    """Settings of preference tuning."""

    usual: ClassVar = {"task": "preference", "lr": 1e-5, "warmup": 0.1, "weight_decay": 0.0}
    about: ClassVar = {"data": "records with prompt, chosen and rejected: .jsonl or .json, or .gz of them"}

    loss: Literal["dpo", "orpo"] = setting(
        "dpo",
        "dpo: against what the model was before (Rafailov et al. 2023); orpo: next-token loss and odds ratio, without "
        "a reference (Hong et al. 2024)",
        group="Task",
    )
    reference: str | None = setting(
        None,
        "the reference of dpo, a model folder [default: the model as the run begins]",
        group="Task",
        is_path=True,
    )
    beta: float = setting(0.1, "weight of the preference: beta of dpo, lambda of orpo", group="Task", gt=0)
    batch: int = setting(16, "pairs of one optimizer step", group="Batch", unit="pairs", ge=1)

    @property
    def rows_per_step(self) -> int:
        """See `RowsConfig`."""
        return self.batch

    def contradictions(self) -> dict[str, bool]:
        """See `TrainConfig`."""
        needless = self.loss == "orpo" and self.reference is not None
        return {"reference is of dpo, and loss is orpo; leave it out": needless, **super().contradictions()}


class PreferenceTuning(RowsTask):
    """Pairs of answers to one prompt; the last message of each is the answer.

    Losses are per pair. The log probabilities of the reference are computed once, before the first step, and kept in
    the run's folder: no second model is held in memory.
    """

    settings = PreferenceConfig
    measured_by = (*MEASURED_BY, "template", "stop", "loss", "beta", "reference")
    next_command = "headway chat {model}"
    config: PreferenceConfig
    train_rows: PairRows

    def __init__(
        self, config: PreferenceConfig, folder: Path, start: Path | None, dtype: torch.dtype
    ) -> None:
        self.config = config
        train, held, said = split(config, (Pair,), (Pair,))
        tokenizer = find_tokenizer(config, folder, start, lambda: _texts(train), masked=False)
        tokenizer, stop, self.generation = conversation_tokenizer(config, tokenizer)
        rows, more = self.rows(train, config, tokenizer, stop)
        self.held_rows = None
        if held is not None:
            self.held_rows, left_out = self.rows(held, config, tokenizer, stop)
            more += [f"held out: {remark}" for remark in left_out]
        self.begin(first_model(config, tokenizer.vocab_size), tokenizer, rows, dtype)
        if config.loss == "dpo":
            computes = MasterWeights(self.model, dtype).compute
            if config.reference is not None:
                computes = reference_model(config.reference, tokenizer, dtype, config.backend)
            files = [folder / "data" / REFERENCE, folder / "data" / f"held-{REFERENCE}"]
            for file, pairs in zip(files, (rows, self.held_rows), strict=True):
                if pairs is not None:
                    pairs.reference = kept_reference(computes, pairs, file)
        self.data, self.remarks, self.unit = described(train), [*said, *more], "pair"

    @classmethod
    def unsupported(cls, spec: ModelSpec) -> str | None:
        return None if spec.causal and spec.encoder is None else f"{spec.family} is no decoder"

    @classmethod
    def amount(cls, config: PreferenceConfig, tokenizer: Tokenizer | None) -> Amount:
        """See `RowsTask`: exact where there is a tokenizer."""
        spec = model_spec(config, None if tokenizer is None else tokenizer.vocab_size)
        train, _, _ = split(config, (Pair,), (Pair,))
        if tokenizer is None:
            return Amount(spec, {"training pairs": len(train)}, False, len(train), texts=2)
        tokenizer, stop, _ = conversation_tokenizer(config, tokenizer)
        rows, _ = cls.rows(train, config, tokenizer, stop)
        return Amount(spec, {"training pairs": len(rows)}, True, len(rows), texts=2)

    @classmethod
    def rows(
        cls, records: Sequence[Record], config: PreferenceConfig, tokenizer: Tokenizer, stop: Collection[int]
    ) -> tuple[PairRows, list[str]]:
        """Pairs that fit the context, and what is said of those that do not. Raises DataError when none is left."""
        found: list[tuple[Segments, Segments]] = []
        for record in records:
            assert isinstance(record, Pair)
            try:
                both = [
                    chat_segments(tokenizer, [*record.prompt, *answer], stop=stop, train_on="last")
                    for answer in (record.chosen, record.rejected)
                ]
            except DataError as error:
                raise DataError(f"{record.where}: {error}") from None
            if max(len(one.ids) for one in both) <= config.context:
                found.append((both[0], both[1]))
        left_out = len(records) - len(found)
        if not found:
            raise DataError(
                f"{config.data}: none of the {len(records)} pairs fits context {config.context}; raise it"
            )
        said = f"{left_out} of {len(records)} pairs are longer than context {config.context}: left out"
        return PairRows(found), [said] if left_out else []

    def count(self, batch: PairBatch) -> int:
        """Pairs."""
        return batch.reference.shape[1]

    def loss(self, model: Decoder | Encoder, batch: PairBatch) -> Sums:
        """See `Objective`; and how many pairs are ranked right, by how much, and log p of both answers."""
        return pair_loss(model, batch, self.config)

    def quality(self, stats: StepStats) -> dict[str, float | None]:
        """See `RowsTask`: pairs ranked right, the mean margin, and mean log p of the answers."""
        return {**means(stats.extra, stats.count)}

    def evaluate(self, model: Decoder | Encoder, pool: MicrobatchPool, *, whole: bool) -> Evaluation | None:
        """See `Objective`."""
        return None if self.held_rows is None else evaluate_pairs(model, self.held_rows, self.config)

    @classmethod
    def measure(
        cls, config: PreferenceConfig, subject: Subject, pool: MicrobatchPool, limit: int | None = None
    ) -> tuple[Evaluation, Sequence[str]]:
        """See `Task`."""
        if config.loss == "dpo" and config.reference is None:
            raise ConfigError(
                "dpo compares a model with the one that its training began with; give that one's folder "
                "(reference=FOLDER), or say loss=orpo, which has no reference"
            )
        records, said = measured_records(config, (Pair,), limit)
        tokenizer, stop, _ = conversation_tokenizer(config, subject.tokenizer, generation=subject.generation)
        rows, more = cls.rows(records, config, tokenizer, stop)
        if config.loss == "dpo":
            assert config.reference is not None
            dtype = next(subject.model.parameters()).dtype
            model = reference_model(config.reference, tokenizer, dtype, config.backend)
            rows.reference = reference(model, rows)
        return evaluate_pairs(subject.model, rows, config), [*said, *more]


def pair_loss(model: Decoder | Encoder, batch: PairBatch, config: PreferenceConfig) -> Sums:
    """What `PreferenceTuning.loss` is, by the loss of the settings."""
    chosen, rejected = log_p(model, batch).unbind(0)
    if config.loss == "dpo":
        known = batch.reference.to(chosen)
        each = dpo_loss(chosen, rejected, (known[0], known[1]), config.beta)
        margin = (chosen - known[0]) - (rejected - known[1])
    else:
        tokens = (batch.targets != IGNORE_INDEX).sum(1).to(chosen).view(2, -1)
        each = orpo_loss(chosen, rejected, (tokens[0], tokens[1]), config.beta)
        margin = chosen / tokens[0] - rejected / tokens[1]
    sums = {
        "hits": (margin > 0).sum(),
        "margin": margin.sum(),
        "chosen": chosen.sum(),
        "rejected": rejected.sum(),
        "read": batch.inputs["tokens"].valid.sum(),
    }
    return Sums(
        each.sum(), each.sum().detach(), {name: float(value.detach()) for name, value in sums.items()}
    )


@torch.no_grad()
def evaluate_pairs(model: Decoder | Encoder, rows: PairRows, config: PreferenceConfig) -> Evaluation:
    """Loss of a model on pairs, and what `means` has, in evaluation mode."""
    total, sums, begin = 0.0, dict[str, float](), time.perf_counter()
    training = model.training
    model.eval()
    try:
        for at in range(0, len(rows), AT_ONCE):
            found = pair_loss(model, rows.batch(range(at, min(at + AT_ONCE, len(rows)))), config)
            total += float(found.loss)
            sums = {name: sums.get(name, 0.0) + value for name, value in found.extra.items()}
    finally:
        model.train(training)
    seconds = time.perf_counter() - begin
    return Evaluation(total, len(rows), seconds=seconds, metrics=means(sums, len(rows)), unit="pair")


def _texts(records: Sequence[Record]) -> Iterator[str]:
    """All text of the pairs, for a tokenizer that is to be trained."""
    for record in records:
        assert isinstance(record, Pair)
        yield from message_texts([*record.prompt, *record.chosen, *record.rejected])


def means(sums: Any, count: int) -> dict[str, float]:
    """The sums of `PreferenceTuning.loss`, per pair."""
    names = {"accuracy": "hits", "margin": "margin", "chosen_log_p": "chosen", "rejected_log_p": "rejected"}
    return {name: sums[key] / count for name, key in names.items()} if count else {}
