"""A better and a worse answer: direct preference optimisation, and odds ratios without a reference model.

Legend: P pairs of a batch, N pairs of a run, T slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import torch

from headway.data.record_kinds import Preference as Pair
from headway.errors import ConfigError, DataError
from headway.models import Decoder, Encoder
from headway.text.segments import Segments, chat_segments
from headway.train.config import setting
from headway.train.conversations import ConversationConfig, ConversationTask, message_texts
from headway.train.microbatch_pool import MasterWeights
from headway.train.tasks.base import StepStats, Sums
from headway.train.tasks.pairs import PairBatch, PairRows, kept_reference, means, reference, reference_model
from headway.train.tasks.records import Reading

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


class PreferenceTuning(ConversationTask):
    """Pairs of answers to one prompt; the last message of each is the answer.

    Losses are per pair. The log probabilities of the reference are computed once, before the first step, and kept in
    the run's folder: no second model is held in memory.
    """

    settings = PreferenceConfig
    kinds = (Pair,)
    measured_by = (*ConversationTask.measured_by, "loss", "beta", "reference")
    most_texts = 2
    config: PreferenceConfig
    train_rows: PairRows

    def __init__(
        self, config: PreferenceConfig, folder: Path, start: Path | None, dtype: torch.dtype
    ) -> None:
        super().__init__(config, folder, start, dtype)
        if config.loss == "orpo":
            return
        computes = MasterWeights(self.model, dtype).compute
        if config.reference is not None:
            computes = reference_model(config.reference, self.tokenizer, dtype, config.backend)
        files = [folder / "data" / REFERENCE, folder / "data" / f"held-{REFERENCE}"]
        for file, pairs in zip(files, (self.train_rows, self.held_rows), strict=True):
            if pairs is not None:
                pairs.reference = kept_reference(computes, pairs, file)

    @classmethod
    def texts(cls, records: Sequence[Pair]) -> Iterator[str]:
        for record in records:
            yield from message_texts([*record.prompt, *record.chosen, *record.rejected])

    @classmethod
    def rows(cls, records: Sequence[Pair], config: PreferenceConfig, reading: Reading) -> PairRows:
        """See `RecordsTask`: pairs that fit the context. Raises DataError when none is left, ConfigError for a model
        that is measured when nobody says what it was before."""
        if reading.measured is not None and config.loss == "dpo" and config.reference is None:
            raise ConfigError(
                "dpo compares a model with the one that its training began with; give that one's folder "
                "(reference=FOLDER), or say loss=orpo, which has no reference"
            )
        found: list[tuple[Segments, Segments]] = []
        for record in records:
            try:
                both = [
                    chat_segments(
                        reading.tokenizer, [*record.prompt, *answer], stop=reading.stop, train_on="last"
                    )
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
        rows = PairRows(found, config.loss, config.beta, [said] if left_out else [])
        if config.loss == "dpo" and (model := reading.measured) is not None:
            dtype = next(model.parameters()).dtype
            before = reference_model(str(config.reference), reading.tokenizer, dtype, config.backend)
            rows.reference = reference(before, rows)
        return rows

    def quality(self, stats: StepStats) -> dict[str, float | None]:
        """See `RowsTask`: pairs ranked right, the mean margin, and mean log p of the answers."""
        return {**means(stats.extra, stats.count)}

    def count(self, batch: PairBatch) -> int:
        """See `Objective`: pairs."""
        return batch.reference.shape[1]

    def sums(self, model: Decoder | Encoder, batch: PairBatch) -> Sums:
        """See `RowsTask`."""
        return self.train_rows.sums(model, batch)
