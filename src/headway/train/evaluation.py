"""Held-out text: bits per byte, perplexity, loss by position."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.data import Rows, TokenFile
from headway.errors import ConfigError, DataError
from headway.models import Decoder
from headway.train.loss import IGNORED, cross_entropy_sum
from headway.train.workers import Workers

BATCH_TOKENS = 8192
LEAST_BUCKET = 16


@dataclass(frozen=True)
class Bucket:
    """Mean loss of predictions that had `first`..`last` tokens of their own document before them in the row."""

    first: int
    last: int
    tokens: int
    nats: float

    @property
    def loss(self) -> float | None:
        """Nats per token; None where there is no token."""
        return self.nats / self.tokens if self.tokens else None


@dataclass(frozen=True)
class Evaluation:
    """Loss of a model on a token file.

    Attributes:
        nats: sum of -ln p over all predicted tokens.
        tokens: predicted tokens: all but the first of each document.
        text_bytes: UTF-8 bytes of the text that they stand for; 0 when it is not known.
        seconds: of computing.
        positions: the same loss by the number of tokens that the prediction could look back on.
    """

    nats: float
    tokens: int
    text_bytes: int
    seconds: float
    positions: tuple[Bucket, ...]

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        """exp(loss): per token, so it depends on the tokenizer."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """nats / ln 2 / UTF-8 bytes: comparable between tokenizers, and with compressors."""
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else None


def evaluate(
    model: Decoder,
    file: TokenFile,
    context: int,
    *,
    limit: int | None = None,
    workers: Workers | None = None,
) -> Evaluation:
    """Predict every token of `file` but the first of each document, in rows of `context` tokens.

    Rows do not overlap, so a prediction looks back on 1 to `context` tokens: the number is an upper bound of
    what a longer look back would give. With `limit`, only about the first `limit` tokens are predicted, and
    the bytes are those of the whole file times the share of tokens. `workers` compute batches side by side.

    Raises DataError when no token can be predicted.
    """
    rows = Rows(file, context)
    count = len(rows) if limit is None else min(len(rows), max(1, -(-limit // context)))
    workers = workers or Workers(1)
    per_batch = max(1, BATCH_TOKENS // context // workers.count)

    @torch.no_grad()
    def run(start: int) -> tuple[Tensor, Tensor]:
        ids, targets, described = rows.batch(range(start, min(start + per_batch, count)))
        _, losses = cross_entropy_sum(model.hidden(ids, tokens=described), output_weight(model), targets)
        keep = targets != IGNORED
        return described.index.expand(targets.shape)[keep], losses[keep].double()

    sums, counts = torch.zeros(context, dtype=torch.float64), torch.zeros(context, dtype=torch.int64)
    training = model.training
    model.eval()
    begin = time.perf_counter()
    try:
        for at, losses in workers.map(run, range(0, count, per_batch)):
            sums.index_add_(0, at, losses)
            counts.index_add_(0, at, torch.ones_like(at))
    finally:
        model.train(training)
    seconds = time.perf_counter() - begin
    tokens = int(counts.sum())
    if not tokens:
        raise DataError(f"{file.path}: no token to predict: every document has a single token")
    total = len(file) - file.documents if file.documents else len(file) - 1
    whole = count == len(rows)
    text_bytes = file.text_bytes if whole else round(file.text_bytes * tokens / max(total, 1))
    return Evaluation(float(sums.sum()), tokens, text_bytes, seconds, _buckets(sums, counts))


def output_weight(model: Decoder) -> Tensor:
    """The matrix [V, M] that logits are made with.

    Raises ConfigError where it is not all there is to them."""
    layer = model.lm_head
    if layer.bias is not None or layer.scale != 1.0:
        raise ConfigError(
            "losses are computed from states and one matrix, and this model's logits have "
            + ("a bias (output_bias)" if layer.bias is not None else f"a factor (logit_scale={layer.scale})")
        )
    return model.model.embedding if layer.weight is None else layer.weight


def _buckets(sums: Tensor, counts: Tensor) -> tuple[Bucket, ...]:
    """Doubling ranges of positions: 0-15, 16-31, 32-63, ..."""
    found, first, size = [], 0, LEAST_BUCKET
    while first < len(sums):
        stop = min(size, len(sums))
        found.append(Bucket(first, stop - 1, int(counts[first:stop].sum()), float(sums[first:stop].sum())))
        first, size = stop, 2 * size
    return tuple(found)
