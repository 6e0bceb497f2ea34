"""Rows of pairs of answers, and their log probabilities under a model and under its reference.

Legend: P pairs of a batch, N pairs of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from headway.checkpoints.folder import load_folder
from headway.checkpoints.restore import build_model
from headway.errors import ConfigError
from headway.models import Decoder, Encoder
from headway.nn import IGNORE_INDEX
from headway.nn.preference import dpo_loss, orpo_loss
from headway.storage.safetensors import write_safetensors
from headway.storage.tensors import open_tensors
from headway.text import Tokenizer
from headway.text.segments import Segments
from headway.tokens import Tokens
from headway.train.evaluation import Evaluation, evaluating
from headway.train.microbatch_pool import ALONE, MicrobatchPool
from headway.train.tasks.base import Sums
from headway.train.tasks.records import RecordRows

AT_ONCE = 8


class PairBatch(NamedTuple):
    """Chosen answers in rows 0..P-1, rejected ones in P..2P-1 [2P, T]; `reference` [2, P] log p of both."""

    inputs: dict[str, Any]
    targets: Tensor
    reference: Tensor


class PairRows(RecordRows):
    """Pairs of conversations, and the `loss` that compares them, weighted by `beta`.

    reference    log p of chosen and rejected under the reference [2, N]; zeros until it is computed"""

    unit = "pair"

    def __init__(
        self,
        pairs: Sequence[tuple[Segments, Segments]],
        loss: Literal["dpo", "orpo"],
        beta: float,
        remarks: Sequence[str] = (),
    ) -> None:
        self.pairs, self.reference = pairs, torch.zeros(2, len(pairs))
        self.loss, self.beta, self.remarks = loss, beta, remarks

    def __len__(self) -> int:
        return len(self.pairs)

    def batch(self, indices: Sequence[int]) -> PairBatch:
        """The given pairs, padded to the longest of their rows."""
        rows = [self.pairs[i][side] for side in (0, 1) for i in indices]
        lengths = [len(row.ids) - 1 for row in rows]
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        targets = torch.full_like(ids, IGNORE_INDEX)
        for b, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            whole = torch.tensor(row.ids)
            ids[b, :n] = whole[:-1]
            targets[b, :n] = torch.where(torch.tensor(row.turns[1:]) > 0, whole[1:], IGNORE_INDEX)
        inputs = {"ids": ids, "tokens": Tokens.from_lengths(lengths)}
        return PairBatch(inputs, targets, self.reference[:, list(indices)])

    def sums(self, model: Decoder | Encoder, batch: PairBatch) -> Sums:
        """The loss of a batch; and how many pairs are ranked right, by how much, and log p of both answers."""
        chosen, rejected = log_p(model, batch).unbind(0)
        if self.loss == "dpo":
            known = batch.reference.to(chosen)
            each = dpo_loss(chosen, rejected, (known[0], known[1]), self.beta)
            margin = (chosen - known[0]) - (rejected - known[1])
        else:
            tokens = (batch.targets != IGNORE_INDEX).sum(1).to(chosen).view(2, -1)
            each = orpo_loss(chosen, rejected, (tokens[0], tokens[1]), self.beta)
            margin = chosen / tokens[0] - rejected / tokens[1]
        sums = {
            "hits": (margin > 0).sum(),
            "margin": margin.sum(),
            "chosen": chosen.sum(),
            "rejected": rejected.sum(),
        }
        extra = {name: float(value.detach()) for name, value in sums.items()}
        return Sums(each.sum(), each.sum().detach(), extra)

    @torch.no_grad()
    def evaluate(self, model: Decoder | Encoder, pool: MicrobatchPool = ALONE) -> Evaluation:
        """See `RecordRows`: the loss, and what `means` has."""
        total, sums = 0.0, dict[str, float]()
        with evaluating(model) as clock:
            for at in range(0, len(self), AT_ONCE):
                found = self.sums(model, self.batch(range(at, min(at + AT_ONCE, len(self)))))
                total += float(found.loss)
                sums = {name: sums.get(name, 0.0) + value for name, value in found.extra.items()}
            seconds = clock()
        return Evaluation(total, len(self), seconds=seconds, metrics=means(sums, len(self)), unit="pair")


def log_p(model: Decoder | Encoder, batch: PairBatch) -> Tensor:
    """log p of the answers [2, P], differentiable: the sum over their tokens."""
    found = model(**batch.inputs, targets=batch.targets, label_smoothing=0.0)
    total: Tensor = -found.each.sum(1).view(2, -1)
    return total


def reference_model(folder: str, tokenizer: Tokenizer, dtype: torch.dtype, backend: str) -> Decoder:
    """The model of a folder, as a reference. Raises ConfigError for one that is no decoder, DataError where it lacks
    ids of the tokenizer."""
    model = build_model(load_folder(folder), dtype=dtype, backend=backend)
    if not isinstance(model, Decoder):
        raise ConfigError(f"reference {folder}: {model.spec.family} is no decoder")
    tokenizer.require_fits(model.spec.vocab)
    return model


@torch.no_grad()
def reference(model: Decoder | Encoder, rows: PairRows) -> Tensor:
    """log p of all pairs [2, N] under the model, in float32."""
    model.eval()
    parts = [range(at, min(at + AT_ONCE, len(rows))) for at in range(0, len(rows), AT_ONCE)]
    return torch.cat([log_p(model, rows.batch(part)) for part in parts], dim=1).float().contiguous()


def kept_reference(model: Decoder | Encoder, rows: PairRows, file: Path) -> Tensor:
    """`reference` from `file`, or computed and kept there."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(file, {"log_p": reference(model, rows)})
    return open_tensors(file)["log_p"].clone()


def means(sums: Mapping[str, float], count: int) -> dict[str, float]:
    """The sums of `PairRows.sums`, per pair."""
    names = {"accuracy": "hits", "margin": "margin", "chosen_log_p": "chosen", "rejected_log_p": "rejected"}
    return {name: sums[key] / count for name, key in names.items()} if count else {}
