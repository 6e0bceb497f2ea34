"""Preference tuning on pairs of answers: direct preference optimisation (DPO), and ORPO, without a reference model.

Legend: P pairs of a batch, N pairs of a run, T slots.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from headway.checkpoints.folder import load_folder
from headway.checkpoints.restore import build_model
from headway.data.record_kinds import Preference as Pair
from headway.data.rows import padded
from headway.errors import ConfigError, DataError, as_error
from headway.models import Decoder, Encoder
from headway.nn import IGNORE_INDEX
from headway.nn.preference import dpo_loss, orpo_loss
from headway.storage.safetensors import write_safetensors
from headway.storage.tensors import open_tensors
from headway.text import Tokenizer
from headway.text.segments import Segments, chat_segments
from headway.tokens import Tokens
from headway.train.config import setting
from headway.train.evaluation import Evaluation, measured
from headway.train.microbatch_pool import ALONE, MasterWeights, MicrobatchPool
from headway.train.rows_config import ExamplesConfig
from headway.train.tasks.base import StepStats, Sums, cut
from headway.train.tasks.chat import ConversationConfig, ConversationTask, message_texts
from headway.train.tasks.records import Reading, RecordRows

REFERENCE = "reference.safetensors"
AT_ONCE = 8


class PreferenceConfig(ConversationConfig, ExamplesConfig):
    """Settings of preference tuning.

    data: records with prompt, chosen and rejected: .jsonl or .json, or .gz of them
    loss: dpo: relative to a reference model (Rafailov et al. 2023); orpo: next-token loss and odds ratio,
        without a reference (Hong et al. 2024)
    reference: folder of the reference model of dpo [default: the model at the beginning of the run]
    beta: weight of the preference: beta of dpo, lambda of orpo
    batch: pairs of one optimizer step
    """

    usual: ClassVar = {"task": "preference", "batch": 16, "lr": 1e-5, "warmup": 0.1, "weight_decay": 0.0}

    loss: Literal["dpo", "orpo"] = setting("dpo", group="Task")
    reference: str | None = setting(None, group="Task", is_path=True)
    beta: float = setting(0.1, group="Task", gt=0)

    def contradictions(self) -> Iterable[str]:
        if self.loss == "orpo" and self.reference is not None:
            yield "reference is for loss=dpo only, and loss is orpo; leave it out"


class PairBatch(NamedTuple):
    """A batch of pairs: chosen answers in rows 0..P-1, rejected ones in rows P..2P-1, [2P, T]; and `reference` [2, P],
    the log probabilities of both under the reference model."""

    inputs: dict[str, Any]
    targets: Tensor
    reference: Tensor


class PairRows(RecordRows):
    """Pairs of conversations, and the name `loss` and weight `beta` of the loss that compares them.

    reference    log p of chosen and rejected answers under the reference model [2, N]; zeros until it is computed"""

    unit = "pair"

    def __init__(self, records: Sequence[Pair], config: PreferenceConfig, reading: Reading) -> None:
        """Encodes the pairs and keeps those that fit the context. Raises DataError if none is left, ConfigError if a
        model is measured by dpo without the setting `reference`."""
        self.loss, self.beta, self.pairs = config.loss, config.beta, list[tuple[Segments, Segments]]()
        if reading.measured is not None and config.loss == "dpo" and config.reference is None:
            raise ConfigError(
                "loss=dpo needs the model that training began with; give its folder (reference=FOLDER), or loss=orpo, "
                "which needs no reference"
            )
        for record in records:
            with as_error(DataError, record.where):
                chosen, rejected = (
                    chat_segments(
                        reading.tokenizer, [*record.prompt, *answer], stop=reading.stop, train_on="last"
                    )
                    for answer in (record.chosen, record.rejected)
                )
            if max(len(chosen.ids), len(rejected.ids)) <= config.context:
                self.pairs.append((chosen, rejected))
        if not self.pairs:
            raise DataError(
                f"{config.data}: none of the {len(records)} pairs fits context {config.context}; raise context"
            )
        if left_out := len(records) - len(self.pairs):
            remark = f"{left_out} of {len(records)} pairs are longer than context {config.context}: left out"
            self.remarks = [remark]
        self.reference = torch.zeros(2, len(self.pairs))
        if config.loss == "dpo" and (model := reading.measured) is not None:
            dtype = next(model.parameters()).dtype
            before = reference_model(str(config.reference), reading.tokenizer, dtype, config.backend)
            self.reference = reference(before, self)

    def __len__(self) -> int:
        return len(self.pairs)

    def batch(self, indices: Sequence[int]) -> PairBatch:
        """Returns these pairs as a batch, padded to the longest of their rows."""
        rows = [self.pairs[i][side] for side in (0, 1) for i in indices]
        labels = [[i if t else IGNORE_INDEX for i, t in zip(row.ids, row.turns, strict=True)] for row in rows]
        tokens = Tokens.from_lengths([len(row.ids) - 1 for row in rows])
        inputs = {"ids": padded([row.ids[:-1] for row in rows]), "tokens": tokens}
        targets = padded([row[1:] for row in labels], IGNORE_INDEX)
        return PairBatch(inputs, targets, self.reference[:, list(indices)])

    def sums(self, model: Decoder | Encoder, batch: PairBatch) -> Sums:
        """Computes the loss of a batch, and sums over its pairs: of correct rankings (`hits`), of margins, and of log p
        of both answers."""
        chosen, rejected = log_p(model, batch).unbind(0)
        if self.loss == "dpo":
            reference_log_p = batch.reference.to(chosen)
            losses = dpo_loss(chosen, rejected, (reference_log_p[0], reference_log_p[1]), self.beta)
            margin = (chosen - reference_log_p[0]) - (rejected - reference_log_p[1])
        else:
            tokens = (batch.targets != IGNORE_INDEX).sum(1).to(chosen).view(2, -1)
            losses = orpo_loss(chosen, rejected, (tokens[0], tokens[1]), self.beta)
            margin = chosen / tokens[0] - rejected / tokens[1]
        sums = {
            "hits": (margin > 0).sum(),
            "margin": margin.sum(),
            "chosen": chosen.sum(),
            "rejected": rejected.sum(),
        }
        extra = {name: float(value.detach()) for name, value in sums.items()}
        return Sums(losses.sum(), losses.sum().detach(), extra)

    def evaluate(self, model: Decoder | Encoder, pool: MicrobatchPool = ALONE) -> Evaluation:
        """See `RecordRows`: the loss, and the measures of `means`."""
        total, sums = 0.0, dict[str, float]()
        parts, seconds = measured(
            model, lambda pairs: self.sums(model, self.batch(pairs)), cut(range(len(self)), AT_ONCE), pool
        )
        for part in parts:
            total += float(part.loss)
            sums = {name: sums.get(name, 0.0) + value for name, value in part.extra.items()}
        return Evaluation(total, len(self), seconds=seconds, metrics=means(sums, len(self)), unit="pair")


class PreferenceTuning(ConversationTask):
    """The task of training on pairs of answers to the same prompt; the last message of each is the answer.

    Losses are per pair. The log probabilities under the reference model are computed once, before the first step, and
    kept in the run's folder, so that training holds no second model in memory.
    """

    settings = PreferenceConfig
    kinds = (Pair,)
    rows = PairRows
    measured_by = (*ConversationTask.measured_by, "loss", "beta", "reference")
    most_texts = 2
    config: PreferenceConfig
    train_rows: PairRows

    def prepare(self, start: Path | None) -> None:
        super().prepare(start)
        config, dtype = self.config, self.inputs.dtype
        if config.loss == "orpo":
            return
        computes = MasterWeights(self.model, dtype).compute
        if config.reference is not None:
            computes = reference_model(config.reference, self.tokenizer, dtype, config.backend)
        for name, pairs in ((REFERENCE, self.train_rows), (f"held-{REFERENCE}", self.held_rows)):
            if pairs is not None:
                pairs.reference = kept_reference(computes, pairs, Path(config.out) / "data" / name)

    @classmethod
    def texts(cls, records: Sequence[Pair]) -> Iterator[str]:
        for record in records:
            yield from message_texts([*record.prompt, *record.chosen, *record.rejected])

    def quality(self, stats: StepStats) -> dict[str, float | None]:
        """See `RowsTask`: the share of pairs that are ranked correctly, the mean margin, and mean log p of answers."""
        return {**means(stats.extra, stats.count)}

    def count(self, batch: PairBatch) -> int:
        """See `Objective`: the number of pairs."""
        return batch.reference.shape[1]

    def sums(self, model: Decoder | Encoder, batch: PairBatch) -> Sums:
        return self.train_rows.sums(model, batch)


def log_p(model: Decoder | Encoder, batch: PairBatch) -> Tensor:
    """Computes log p of the answers [2, P], summed over their tokens; differentiable."""
    output = model(**batch.inputs, targets=batch.targets, label_smoothing=0.0)
    total: Tensor = -output.each.sum(1).view(2, -1)
    return total


def reference_model(folder: str, tokenizer: Tokenizer, dtype: torch.dtype, backend: str) -> Decoder:
    """Loads the model of a folder as a reference. Raises ConfigError if it is no decoder, DataError if it lacks ids of
    the tokenizer."""
    model = build_model(load_folder(folder), dtype=dtype, backend=backend)
    if not isinstance(model, Decoder):
        raise ConfigError(f"reference {folder}: {model.spec.family} is not a decoder")
    tokenizer.require_fits(model.spec.vocab)
    return model


def reference(model: Decoder | Encoder, rows: PairRows) -> Tensor:
    """Computes log p of all pairs [2, N] under the model, in float32."""
    chunks = cut(range(len(rows)), AT_ONCE)
    parts, _ = measured(model, lambda part: log_p(model, rows.batch(part)), chunks, ALONE)
    return torch.cat(parts, dim=1).float().contiguous()


def kept_reference(model: Decoder | Encoder, rows: PairRows, file: Path) -> Tensor:
    """Reads the result of `reference` from `file`, or computes and writes it."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(file, {"log_p": reference(model, rows)})
    return open_tensors(file)["log_p"].clone()


def means(sums: Mapping[str, float], count: int) -> dict[str, float]:
    """Returns the sums of `PairRows.sums` divided by the number of pairs; empty without pairs."""
    names = {"accuracy": "hits", "margin": "margin", "chosen_log_p": "chosen", "rejected_log_p": "rejected"}
    return {name: sums[key] / count for name, key in names.items()} if count else {}
