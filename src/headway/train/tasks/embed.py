"""Training of text embeddings: similar texts get vectors with a high cosine (Reimers and Gurevych 2019, section 3).

Legend: N records of a batch, M width.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.data import Batch
from headway.data.encoded import encoder_inputs
from headway.data.record_kinds import Labelled, Triplet
from headway.errors import DataError
from headway.metrics import spearman
from headway.models import Head, ModelSpec
from headway.models.head import Pool
from headway.similarity import normalize
from headway.train.config import setting
from headway.train.tasks.base import Sums
from headway.train.tasks.heads import HeadRows, HeadTask, WholeConfig, encoded
from headway.train.tasks.records import Reading

NONE = -1  # index in place of a missing negative


class EmbedConfig(WholeConfig):
    """Settings of training text embeddings.

    loss: infonce: find the positive of a text among all positives and negatives of the step; margin: the
        record's own negative must be less similar than its positive, by `margin`
    temperature: of infonce: cosines are divided by it
    margin: of margin: a difference of cosines
    pool: what a text's vector is computed from: the first token's state, or the mean of all
    """

    usual: ClassVar = {"task": "embed", "out": "runs/embed"}
    loss: Literal["infonce", "margin"] = setting("infonce", group="Task")
    temperature: float = setting(0.05, group="Task", gt=0)
    margin: float = setting(0.2, group="Task", gt=0, lt=2)
    pool: Pool = setting("mean", group="Task")

    @property
    def in_one_pass(self) -> bool:
        return self.loss == "infonce"

    def contradictions(self) -> Iterable[str]:
        if self.in_one_pass and self.present(("micro_batch", "workers")):
            yield (
                "loss infonce compares all texts of a step, which is one forward pass; leave micro_batch and workers "
                "out, or lower batch"
            )


class TripletRows(HeadRows):
    """Triplets of texts (anchor, positive, negative), or pairs with a degree of similarity. With the cosine s(a, b) of
    two texts' vectors, the losses are

        infonce   -log exp(s(a, p) / t) / sum over all positives and negatives x of the batch of exp(s(a, x) / t)
        margin    max(0, margin - s(a, p) + s(a, n))

    (van den Oord et al. 2018, equation 4; Schroff et al. 2015, equation 1, with cosines.)

    texts: the different texts. records: indices in `texts` of each record's anchor, positive and negative; NONE for a
    missing negative. degrees: the degree of similarity of each pair, if the records are pairs; else empty."""

    one_each = True

    def __init__(self, records: Sequence[Triplet | Labelled], config: EmbedConfig, reading: Reading) -> None:
        self.spec, self.config, record_texts = reading.spec, config, [_texts_of(record) for record in records]
        wheres = {
            text: record.where for record, texts in zip(records, record_texts, strict=True) for text in texts
        }
        self.texts, self.remarks = encoded(reading.tokenizer, wheres.items(), config)
        number = {text: i for i, text in enumerate(wheres)}
        self.records = [(number[a], number[p], number[n[0]] if n else NONE) for a, p, *n in record_texts]
        self.degrees = [_degree(record) for record in records if isinstance(record, Labelled)]
        if self.degrees and len(self.degrees) < len(records):
            raise DataError(
                f"{records[0].where}: triplets and pairs with a similarity are mixed in this file; split it"
            )

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of the longest text of each record."""
        return [max(len(self.texts[i].ids) for i in record if i != NONE) for record in self.records]

    def batch(self, indices: Sequence[int]) -> Batch:
        """Returns the texts of these records as a batch: all anchors, then all positives, then all negatives. Targets
        [N, 3] are the rows of each record's anchor, positive and negative."""
        records = [self.records[i] for i in indices]
        placed = [
            (row, role) for role in range(3) for row, record in enumerate(records) if record[role] != NONE
        ]
        targets = torch.full((len(records), 3), NONE)
        for slot, (row, role) in enumerate(placed):
            targets[row, role] = slot
        return Batch(
            encoder_inputs([self.texts[records[row][role]] for row, role in placed], self.spec), targets
        )

    def loss(self, outputs: Tensor, batch: Batch) -> Sums:
        vectors, (anchor, positive, negative) = normalize(outputs), batch.targets.unbind(1)
        near, far = cosines(outputs, batch)
        known = negative != NONE
        if self.config.loss == "margin":
            total = (self.config.margin - near + far)[known].clamp(min=0).sum()
        else:
            candidates = vectors[torch.cat([positive, negative[known]])]
            logits = vectors[anchor] @ candidates.T / self.config.temperature
            total = F.cross_entropy(logits, torch.arange(len(logits)), reduction="sum")
        hits = {"hits": int((near > far).sum())} if bool(known.all()) else {}
        return Sums(total, total.detach(), hits)

    def predicted(self, outputs: Tensor, batch: Batch) -> list[tuple[float, float]]:
        near, far = cosines(outputs, batch)
        return list(zip(near.tolist(), far.tolist(), strict=True))

    def scores(self, predictions: Sequence[tuple[float, float]]) -> dict[str, float]:
        """Returns the share of the records with a negative whose positive is nearer than it; for pairs with degrees,
        Spearman's rank correlation of degrees and cosines."""
        if self.degrees:
            return {"spearman": spearman(self.degrees, [near for near, _ in predictions])}
        pairs = [pair for pair in predictions if not math.isnan(pair[1])]
        return {"accuracy": sum(near > far for near, far in pairs) / len(pairs)} if pairs else {}


def cosines(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the cosines [N] of anchor and positive, and of anchor and negative; NaN for a missing negative."""
    vectors, (anchor, positive, negative) = normalize(outputs), batch.targets.unbind(1)
    far = (vectors[anchor] * vectors[negative]).sum(-1)
    return (vectors[anchor] * vectors[positive]).sum(-1), far.masked_fill(negative == NONE, math.nan)


class Embed(HeadTask):
    """The task of training text embeddings, by which similar texts are found."""

    settings = EmbedConfig
    config: EmbedConfig
    head_task = "embed"
    kinds = (Triplet,)
    rows = TripletRows
    measured = (Triplet, Labelled)
    measured_by = (*HeadTask.measured_by, "loss", "temperature", "margin")
    most_texts = 3
    next_command = "headway embed {model} 'a text' 'another' --similarity"

    def head(self, records: Sequence[Triplet], spec: ModelSpec) -> Head:
        return Head("embed", pool=self.config.pool, unit=True)

    @classmethod
    def texts(cls, records: Sequence[Triplet]) -> Iterator[str]:
        return (
            text for record in records for text in (record.anchor, record.positive, record.negative) if text
        )


def _texts_of(record: Triplet | Labelled) -> list[str]:
    if isinstance(record, Triplet):
        return [record.anchor, record.positive, *([] if record.negative is None else [record.negative])]
    if record.pair is None:
        raise DataError(f"{record.where}: expected a pair of texts with their similarity, got one text")
    return [record.text, record.pair]


def _degree(record: Labelled) -> float:
    try:
        return float(record.label)
    except ValueError:
        raise DataError(
            f"{record.where}: the similarity of two texts must be a number, got {record.label!r}"
        ) from None
