"""Feeding tokens to a model and getting the logits of what comes next, with a cache or without.

Legend: B rows, T slots of a call, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.cache import DecoderCache
from headway.models import Decoder
from headway.tokens import Tokens


class DecoderSession:
    """`read(pieces)` continues each row by its piece. The model is in evaluation mode during the call only, so
    that a model in training can be sampled from. `kv_dtype`: what the cache stores, the weights' dtype unless
    given."""

    def __init__(
        self, model: Decoder, batch: int, *, use_cache: bool = True, kv_dtype: torch.dtype | None = None
    ) -> None:
        self.model = model
        self.device = model.model.embedding.device
        self.cache: DecoderCache | None = model.make_cache(batch, dtype=kv_dtype) if use_cache else None
        self._texts: list[list[int]] = [[] for _ in range(batch)]

    def read(self, pieces: Sequence[Sequence[int]], chunk: int | None = None) -> Tensor:
        """Logits [B, V] of the token after each row's piece, read `chunk` tokens at a time."""
        longest = max(map(len, pieces))
        size = chunk or longest
        logits: Tensor | None = None
        for at in range(0, longest, size):
            part = [list(piece[at : at + size]) for piece in pieces]
            now = self._forward(part)
            ends = torch.tensor([at < len(p) <= at + size for p in pieces], device=self.device)
            logits = now if logits is None else torch.where(ends.unsqueeze(1), now, logits)
        assert logits is not None
        return logits

    def step(self, ids: Tensor) -> Tensor:
        """Logits [B, V] of the token after ids [B, T]."""
        return self.read(ids.tolist())

    def reorder(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was; there may be more rows or fewer than before."""
        with torch.inference_mode():
            if self.cache is not None:
                self.cache.reorder(rows)
        self._texts = [self._texts[i] for i in rows]

    def _forward(self, pieces: list[list[int]]) -> Tensor:
        if self.cache is None:
            self._texts = [text + piece for text, piece in zip(self._texts, pieces, strict=True)]
            pieces = self._texts
        lengths = [len(piece) for piece in pieces]
        total = max(lengths)
        ids = torch.zeros(len(pieces), total, dtype=torch.int64)
        for row, piece in zip(ids, pieces, strict=True):
            row[: len(piece)] = torch.tensor(piece, dtype=torch.int64)
        ids = ids.to(self.device)
        if self.cache is None:
            tokens = Tokens.from_lengths(lengths, total).to(self.device)
        else:
            tokens = self.cache.next_tokens(total, lengths)
        last = torch.tensor([[max(n - 1, 0)] for n in lengths], device=self.device)
        training = self.model.training
        try:
            self.model.train(False) if training else None
            with torch.inference_mode():
                logits: Tensor = self.model(ids, tokens=tokens, cache=self.cache, logits_for=last)
        finally:
            self.model.train(True) if training else None
        return logits[:, 0]
