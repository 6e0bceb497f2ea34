"""Evaluation on held-out text: bits per byte, perplexity, and loss and accuracy by position."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headway.data import MaskedRows, Rows
from headway.errors import DataError
from headway.metrics import Confusion
from headway.models import Decoder, Encoder
from headway.nn import IGNORE_INDEX
from headway.train.microbatch_pool import ALONE, MicrobatchPool, R, T

BATCH_TOKENS = 8192
LEAST_BUCKET = 16


@dataclass(frozen=True)
class Bucket:
    """The predictions with `first`..`last` tokens of their document before them in the row: their number (`tokens`),
    the sum of their losses (`nats`), and the number of correct ones (`hits`; None if not counted)."""

    first: int
    last: int
    tokens: int
    nats: float
    hits: int | None = None

    @property
    def loss(self) -> float | None:
        """Nats per token; None if there is no token."""
        return self.nats / self.tokens if self.tokens else None

    @property
    def accuracy(self) -> float | None:
        """Share of the tokens that the model predicts correctly (as its most probable one); None if not counted."""
        return None if self.hits is None or not self.tokens else self.hits / self.tokens


@dataclass(frozen=True)
class Evaluation:
    """Loss and further measures on held-out data.

    Attributes:
        nats: sum of the losses: of -ln p over all predicted tokens.
        tokens: number of predicted tokens (or of what `unit` names); in a text, all but the first of each document, or
            the masked ones.
        text_bytes: UTF-8 bytes of the predicted text; 0 if unknown, and for masked tokens.
        seconds: time of the computation.
        positions: the same loss by the number of tokens of the same document before the predicted one.
        hits: number of tokens that the model predicts correctly; None if not counted.
        metrics: further measures of the task by name, such as f1.
        unit: name of what is predicted.
        confusion: the confusion matrix, if classes are predicted; else None.
    """

    nats: float
    tokens: int
    text_bytes: int = 0
    seconds: float = 0.0
    positions: tuple[Bucket, ...] = ()
    hits: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    unit: str = "token"
    confusion: Confusion | None = None

    @property
    def loss(self) -> float:
        """Mean loss in nats per token, or per `unit`."""
        return self.nats / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        """exp(loss), per token: it depends on the tokenizer."""
        return math.exp(min(self.loss, 700.0))

    @property
    def accuracy(self) -> float | None:
        """Share of the tokens that the model predicts correctly; None if not counted."""
        return None if self.hits is None else self.hits / max(self.tokens, 1)

    @property
    def bits_per_byte(self) -> float | None:
        """nats / ln 2 / UTF-8 bytes: comparable between tokenizers, and with compressors; None if bytes are unknown."""
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else None

    @property
    def record(self) -> dict[str, float | int]:
        """The entries for metrics.jsonl: the loss, for text also tokens, bits per byte and accuracy, and `metrics`."""
        names = ("loss", "tokens", "bits_per_byte", "accuracy") if self.positions else ("loss",)
        measures = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {f"val_{name}": value for name, value in (measures | {**self.metrics}).items()}

    def __str__(self) -> str:
        bits, accuracy = self.bits_per_byte, self.accuracy
        text = f"{bits:.4f} bits/byte" if bits is not None else f"loss {self.loss:.4f}"
        measured = {} if accuracy is None else {"accuracy": accuracy}
        further = "".join(f", {name} {value:.4f}" for name, value in (measured | {**self.metrics}).items())
        return f"{text}{further} over {self.tokens} {self.unit}s"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[Callable[[], float]]:
    """Puts a model into evaluation mode while open; yields a function that returns the seconds since then."""
    training, begin = model.training, time.perf_counter()
    model.eval()
    try:
        yield lambda: time.perf_counter() - begin
    finally:
        model.train(training)


def measured(
    model: nn.Module, run: Callable[[T], R], batches: Iterable[T], pool: MicrobatchPool
) -> tuple[list[R], float]:
    """Calls `run` for each batch with the model in evaluation mode and without gradients; returns the results and the
    seconds that this took. `pool` computes batches in parallel."""
    with evaluating(model) as clock:
        return list(pool.map(torch.no_grad()(run), batches)), clock()


def evaluate(
    model: Decoder | Encoder,
    rows: Rows | MaskedRows,
    *,
    limit: int | None = None,
    pool: MicrobatchPool = ALONE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Evaluates a model on `rows`: on every token but the first of each document (`Rows`), or on the masked tokens
    (`MaskedRows`), whose mask is always the same.

    Rows do not overlap, so that a prediction sees 1 to `rows.length` tokens: the result is an upper bound of the loss
    with more context. With `limit`, only predictions from the first `limit` tokens count, and the bytes are those of
    the whole file times the share of predicted tokens. `pool` computes batches in parallel; `progress(rows done, rows)`
    is called after each batch.

    Raises DataError if there is no token to predict.
    """
    file = rows.file
    is_text = isinstance(rows, Rows)  # every token is predicted once, so that the loss can be stated per byte
    if isinstance(rows, Rows):
        tokens_read = len(file) if limit is None else min(len(file), limit)
        rows = Rows(
            file, max(1, min(rows.length, tokens_read))
        )  # slots after the last token would cost time and count nothing
    length = rows.length
    count = len(rows) if limit is None else min(len(rows), max(1, -(-limit // length)))
    per_batch = max(1, BATCH_TOKENS // length // pool.count)

    @torch.no_grad()
    def run(start: int) -> tuple[Tensor, Tensor, Tensor]:
        inputs, targets = rows.batch(range(start, min(start + per_batch, count)))
        if limit is not None:  # limit 100, rows of 32: in a batch from row 2 on, 100 - 64 = 36 targets count
            targets.view(-1)[max(0, limit - start * length) :] = IGNORE_INDEX
        output, trained = model(**inputs, targets=targets), targets != IGNORE_INDEX
        hits = trained if output.hits is None else output.hits
        return (
            inputs["tokens"].index.expand(targets.shape)[trained],
            output.each[trained].double(),
            hits[trained].long(),
        )

    sums, counts = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.int64)
    hit_counts = torch.zeros_like(counts)
    with evaluating(model) as clock:
        starts = range(0, count, per_batch)
        for start, (positions, losses, hits) in zip(starts, pool.map(run, starts), strict=True):
            progress(min(start + per_batch, count), count)
            sums.index_add_(0, positions, losses)
            counts.index_add_(0, positions, torch.ones_like(positions))
            hit_counts.index_add_(0, positions, hits)
        seconds = clock()
    tokens = int(counts.sum())
    if not tokens:
        reason = "every document has a single token" if is_text else "no token is masked"
        reason += "" if limit is None else f" among the first {limit} tokens"
        raise DataError(f"{file.path}: no token to predict: {reason}")
    share = (
        1.0 if limit is None or limit >= len(rows) * length else tokens / max(len(file) - file.documents, 1)
    )
    return Evaluation(
        float(sums.sum()),
        tokens,
        round(file.text_bytes * share) if is_text else 0,
        seconds,
        _buckets(sums, counts, None if is_text else hit_counts),
        None if is_text else int(hit_counts.sum()),
    )


def _buckets(sums: Tensor, counts: Tensor, right: Tensor | None) -> tuple[Bucket, ...]:
    """Sums over doubling ranges of positions: 0-15, 16-31, 32-63, ..."""
    buckets, first, size = [], 0, LEAST_BUCKET
    while first < len(sums):
        stop = min(size, len(sums))
        hits = None if right is None else int(right[first:stop].sum())
        nats, tokens = float(sums[first:stop].sum()), int(counts[first:stop].sum())
        buckets.append(Bucket(first, stop - 1, tokens, nats, hits))
        first, size = stop, 2 * size
    return tuple(buckets)
