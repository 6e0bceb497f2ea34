"""A model that is generating: texts that grow together, by a decoder or by an encoder-decoder.

Legend: B rows, T slots of a call, N slots whose logits are wanted, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from headway.cache import DecoderCache, KVCache
from headway.models import Decoder, EncoderDecoder
from headway.models.decode_step import DecodeStep
from headway.models.decode_support import unsupported_reason
from headway.tokens import Tokens


class Session(Protocol):
    """What the generation loop asks of a model."""

    def start(self) -> Tensor:
        """Logits [B, V] of the first new token of each row; called once, before `step`."""
        ...

    def step(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Logits [B, T, V] of the token after each of the next ones; T are those of the longest row, and what stands
        beyond a shorter row's means nothing."""
        ...

    def reorder(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was; there may be more rows or fewer than before."""
        ...


class DecoderSession(Session):
    """Continues prompts by a decoder.

    Args:
        model: in evaluation mode during the calls only, so that a model in training can be sampled from.
        prompts: ids, one list per row.
        use_cache: False computes every step from the whole text.
        kv_dtype: what the cache stores; the weights' dtype unless given.
        prefill_chunk: prompts are read so many tokens at a time; at once unless given. Those of different lengths are
            packed, and none is padded, where the cache keeps keys (linear attention keeps one sum a row).
        slack: tokens that can always be taken back (`trim`).
    """

    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[Sequence[int]],
        *,
        use_cache: bool = True,
        kv_dtype: torch.dtype | None = None,
        prefill_chunk: int | None = None,
        slack: int = 0,
    ) -> None:
        self.model, self.prefill_chunk = model, prefill_chunk
        self.device = model.model.like.device
        self.texts = [list(prompt) for prompt in prompts]
        self._make_cache = partial(model.make_cache, slack=slack, dtype=kv_dtype)
        self.cache: DecoderCache | None = self._make_cache(len(self.texts)) if use_cache else None
        self._native: DecodeStep | None = None
        self._stepped = False

    def start(self) -> Tensor:
        longest, shortest = max(map(len, self.texts)), min(map(len, self.texts))
        size = self.prefill_chunk or longest
        keeps_keys = self.cache is not None and all(isinstance(layer, KVCache) for layer in self.cache.layers)
        if keeps_keys and 0 < shortest < longest:
            return self._start_packed(size)
        logits: Tensor | None = None
        for at in range(0, longest, size):
            pieces = [text[at : at + size] for text in self.texts]
            now = self._read(pieces, [max(len(piece) - 1, 0) for piece in pieces])[:, 0]
            ends = torch.tensor([at < len(text) <= at + size for text in self.texts], device=self.device)
            logits = now if logits is None else torch.where(ends.unsqueeze(1), now, logits)
        assert logits is not None
        return logits

    def _start_packed(self, size: int) -> Tensor:
        """As `start`, prompts of different lengths as documents of one row, so that none is padded."""
        packed = self._make_cache(1)
        ends = [torch.zeros(0)] * len(self.texts)
        for at in range(0, max(map(len, self.texts)), size):
            pieces = {b: text[at : at + size] for b, text in enumerate(self.texts) if len(text) > at}
            tokens = packed.next_packed([{b: len(piece) for b, piece in pieces.items()}])
            ids = torch.tensor([[i for piece in pieces.values() for i in piece]], device=self.device)
            last = dict(zip(pieces, accumulate(map(len, pieces.values())), strict=True))
            ending = [b for b in pieces if len(self.texts[b]) <= at + size]
            wanted = torch.tensor([last[b] - 1 for b in ending], dtype=torch.int64, device=self.device)
            with evaluating(self.model):
                found: Tensor = self.model(ids, tokens=tokens, cache=packed, logits_for=wanted)
            for b, logits in zip(ending, found[0], strict=True):
                ends[b] = logits
        with torch.inference_mode():
            packed.unpack(range(len(self.texts)))
        self.cache = packed
        return torch.stack(ends)

    def step(self, ids: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, ids))
        if self.cache is None:
            begins = [len(text) for text in self.texts]
            self.texts = [[*text, *new] for text, new in zip(self.texts, ids, strict=True)]
            return self._read(self.texts, begins, longest)
        native = self._native_step(self.cache)
        if native is None or not native.fits(len(ids), longest):
            return self._read(ids, [0] * len(ids), longest)
        given, lengths = padded(ids)
        with evaluating(self.model):
            return native(given, lengths if min(lengths) < longest else None).clone()

    def trim(self, counts: Sequence[int]) -> None:
        """Forgets the last counts[i] tokens of row i. Raises CacheError for more than are there or `slack` promises."""
        if self.cache is None:
            self.texts = [text[: len(text) - n] for text, n in zip(self.texts, counts, strict=True)]
        elif any(counts):
            with torch.inference_mode():
                self.cache.trim(counts)

    def _native_step(self, cache: DecoderCache) -> DecodeStep | None:
        """Steps as calls of the kernels; None where they cannot run them, which is decided at the first."""
        if not self._stepped:
            able = unsupported_reason(self.model, cache) is None
            self._native, self._stepped = DecodeStep(self.model, cache) if able else None, True
        return self._native

    def reorder(self, rows: Sequence[int]) -> None:
        if self.cache is None:
            self.texts = [self.texts[i] for i in rows]
            return
        with torch.inference_mode():
            self.cache.reorder(rows)

    def _read(self, pieces: Sequence[Sequence[int]], begins: Sequence[int], count: int = 1) -> Tensor:
        """Logits [B, N, V] after N = `count` slots of each piece, from begins[b] on (the last one stands for what would
        be beyond it); pieces go on where their rows ended."""
        ids, lengths = padded(pieces)
        if self.cache is None:
            tokens = Tokens.from_lengths(lengths).to(self.device)
        else:
            tokens = self.cache.next_tokens(ids.shape[1], lengths)
        wanted = (torch.tensor(begins).unsqueeze(1) + torch.arange(count)).clamp_max(ids.shape[1] - 1)
        with evaluating(self.model):
            logits: Tensor = self.model(
                ids.to(self.device), tokens=tokens, cache=self.cache, logits_for=wanted.to(self.device)
            )
        return logits


class Seq2SeqSession(Session):
    """Writes a target for each source, by an encoder-decoder: sources are encoded once, and every layer's keys of
    them are computed once.

    Args:
        model: as in `DecoderSession`.
        sources: ids that the encoder reads, one list per row.
        start: the id that targets begin with.
        use_cache, kv_dtype: as in `DecoderSession`.
    """

    def __init__(
        self,
        model: EncoderDecoder,
        sources: Sequence[Sequence[int]],
        start: int,
        *,
        use_cache: bool = True,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.begin, self.use_cache = model, start, use_cache
        self.device = model.decoder.like.device
        ids, lengths = padded(sources)
        tokens = Tokens.from_lengths(lengths).to(self.device)
        with evaluating(model):
            self.cache = model.make_cache(model.encode(ids.to(self.device), tokens=tokens), dtype=kv_dtype)
        self.texts = torch.zeros(len(sources), 0, dtype=torch.int64, device=self.device)

    def start(self) -> Tensor:
        return self.step([[self.begin]] * len(self.texts))[:, 0]

    def step(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """As in `Session`, for as many tokens of one row as of another."""
        given = torch.tensor(ids, dtype=torch.int64, device=self.device)
        with evaluating(self.model):
            if self.use_cache:
                return self.model.decode(given, self.cache)
            self.texts = torch.cat((self.texts, given), 1)
            return self.model.decode(self.texts, self.cache.fork())[:, -given.shape[1] :]

    def reorder(self, rows: Sequence[int]) -> None:
        self.texts = self.texts[list(rows)]
        with torch.inference_mode():
            self.cache.reorder(rows)


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """Rows of ids as one tensor [B, T], 0 where a row has ended, and their lengths."""
    ids = pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True)
    return ids, [len(row) for row in rows]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While open, the model is in evaluation mode and nothing is recorded for gradients."""
    training = model.training
    try:
        model.train(False) if training else None
        with torch.inference_mode():
            yield
    finally:
        model.train(True) if training else None
