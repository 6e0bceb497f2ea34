"""Probabilities of given continuations under a decoder: for multiple choice, reranking and perplexity.

Legend: B rows, T slots, N scored tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.data.rows import padded
from headway.errors import ConfigError, DataError, check_whole
from headway.generate.config import GenerationConfig
from headway.generate.reader import evaluating
from headway.generate.requests import check_prompts, context_limit
from headway.models import Decoder
from headway.nn import IGNORE_INDEX
from headway.tokens import Tokens

Pair = tuple[Sequence[int] | Tensor, Sequence[int] | Tensor]


@dataclass(frozen=True)
class Score:
    """A continuation and its probability.

    log_prob: ln p(continuation | context), the sum of `log_probs`.
    ids, log_probs: its tokens, and ln p(token | context and the tokens before it) of each.
    is_greedy: whether each token is the most probable one, so that greedy generation would give the continuation.
    """

    log_prob: float
    is_greedy: bool
    ids: tuple[int, ...] = field(repr=False)
    log_probs: tuple[float, ...] = field(repr=False)

    @staticmethod
    def of(ids: Sequence[int], log_probs: Sequence[float], is_greedy: bool) -> "Score":
        return Score(math.fsum(log_probs), is_greedy, tuple(ids), tuple(log_probs))


def score(
    model: Decoder, pairs: Sequence[Pair], *, batch_size: int = 32, beyond_context: bool = False
) -> list[Score]:
    """Returns the `Score` of each (context, continuation), both token ids, in their order.

    Pairs are read in batches of `batch_size`, the longest first; batching changes results only by the rounding of the
    model's products. Logits are computed for a chunk of scored tokens at a time.

    Raises DataError for a context or a continuation that is empty or has an id outside the vocabulary, ConfigError for
    a pair that does not fit into the context (its last token need not be read: n tokens take n - 1 slots).
    """
    check_whole("batch_size", batch_size)
    if any(len(continuation) == 0 for _, continuation in pairs):
        number = [len(continuation) for _, continuation in pairs].index(0)
        raise DataError(f"continuation {number} is empty; give it at least one token")
    if not pairs:
        return []
    vocab, config = model.spec.vocab, GenerationConfig(beyond_context=beyond_context)
    limit = context_limit(model.spec, config)
    contexts = check_prompts([context for context, _ in pairs], vocab)
    targets = check_prompts([continuation for _, continuation in pairs], vocab)
    rows = [[*context, *ids] for context, ids in zip(contexts, targets, strict=True)]
    for i, row in enumerate(rows):
        if limit is not None and len(row) - 1 > limit:
            raise ConfigError(
                f"pair {i}: {len(contexts[i])} tokens of context and {len(targets[i])} of the continuation exceed "
                f"{limit + 1}, the most that the model's context of {limit} can score; shorten the pair's context"
                + ("" if limit == model.spec.context_limit else ", or set beyond_context=True")
            )
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    scores: dict[int, Score] = {}
    for begin in range(0, len(rows), batch_size):
        batch = order[begin : begin + batch_size]
        log_probs, hits = _scored(model, [rows[i] for i in batch], [len(contexts[i]) for i in batch])
        sizes = [len(targets[i]) for i in batch]
        for i, values, greedy in zip(batch, log_probs.split(sizes), hits.split(sizes), strict=True):
            scores[i] = Score.of(targets[i], values.tolist(), bool(greedy.all()))
    return [scores[i] for i in range(len(rows))]


def _scored(model: Decoder, rows: list[list[int]], begins: list[int]) -> tuple[Tensor, Tensor]:
    """Returns ln p of the tokens of each row from its place in `begins` on, concatenated [N], and whether each is
    greedy."""
    ids, targets = padded([row[:-1] for row in rows]), padded([row[1:] for row in rows])
    lengths = [len(row) - 1 for row in rows]
    slots, device = torch.arange(ids.shape[1]), model.model.like.device
    first, count = (torch.tensor(values).unsqueeze(1) for values in (begins, lengths))
    # slot t predicts token t + 1: a continuation from token 3 on is scored at slots 2, 3, ...
    scored = (slots >= first - 1) & (slots < count)
    targets = torch.where(scored, targets, IGNORE_INDEX)[scored].to(device)
    with evaluating(model):
        hidden = model.hidden(ids.to(device), tokens=Tokens.from_lengths(lengths).to(device))
        losses = model.cross_entropy(hidden[scored.to(device)], targets, hits=True)
    assert losses.hits is not None
    return -losses.each.double().cpu(), losses.hits.cpu()


def rolling_windows(ids: Sequence[int], prefix: int, length: int) -> list[Pair]:
    """Returns (context, continuation) pairs that score each of `ids` exactly once, in windows of `length` slots.

    The first window begins with `prefix`; each further window scores the next tokens, at most `length`, and its context
    is as many of the preceding tokens as fit: at least one. The same windows as lm-evaluation-harness's
    (`get_rolling_token_windows` with a context of 1)."""
    # 5 ids in windows of 2, by their indices: ([prefix], [0, 1]), ([1], [2, 3]), ([2, 3], [4])
    first = min(length, len(ids))
    if length < 1:
        raise ConfigError(f"window must be at least 1, got {length}")
    windows: list[Pair] = [([prefix], list(ids[:first]))] if ids else []
    for done in range(first, len(ids), length):
        end = min(len(ids), done + length)
        windows.append((list(ids[end - length - 1 : done]), list(ids[done:end])))
    return windows
