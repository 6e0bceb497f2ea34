"""What every cache does, that of one layer and that of all: numbers the next tokens, forgets, copies, chooses rows.

Legend: B rows, K kv heads, T slots of a chunk, S slots attended over, D per key, E per value.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self, final

import torch
from torch import Tensor

from headway.attention import KeyValues
from headway.cache.chunk import Chunk
from headway.cache.lengths import Documents, SequenceLengths, next_packed, next_tokens, trimmed
from headway.cache.policy import SlotPolicy
from headway.cache.spec import CacheSpec
from headway.cache.storage import Storage
from headway.cache.table import SlotTable
from headway.errors import CacheError
from headway.tokens import Tokens


class Cache(ABC):
    """The past of one layer (`LayerCache`), or of all layers of a decoder (`DecoderCache`).

    A row holds one document, or several packed side by side (`Tokens.packed`): a document is a sequence of its own,
    goes on from its own length, and no other sees it. Caches hold no gradients.
    """

    @property
    @abstractmethod
    def layers(self) -> Sequence[LayerCache]:
        """The layers, from the first to the last."""

    @property
    @abstractmethod
    def documents(self) -> Sequence[Documents]:
        """Of each row, how many tokens each of its documents has seen (and not forgotten): {document: tokens}, with
        document 0 where rows are not packed."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each row has seen (and not forgotten), as Python numbers; of all its documents together."""
        return tuple(sum(row.values()) for row in self.documents)

    @property
    def length(self) -> Tensor:
        """`lengths` as a tensor, int64 [B]."""
        return torch.tensor(self.lengths, dtype=torch.int64, device=self.device)

    @property
    def batch(self) -> int:
        """Rows, B."""
        return len(self.layers[0].sequences.rows)

    @property
    def device(self) -> torch.device:
        """Where it is stored."""
        return self.layers[0].sequences.device

    # -- numbering what comes --------------------------------------------------------------------------

    @final
    def next_tokens(
        self, count: int, lengths: Sequence[int] | Tensor | None = None, side: str = "right"
    ) -> Tokens:
        """The tokens of the next chunk, numbered from where each row ended.

        Args:
            count: slots of the chunk, T.
            lengths: how many of them are tokens, per row [B]; all unless given.
            side: where the padding of shorter rows stands, "right" or "left".
        Returns:
            Tokens [B|1, T]; with `start` when all rows go on from one index without padding.
        Raises:
            CacheError: numbers that do not fit, or a row of several documents (`next_packed`).
        """
        return next_tokens(self.documents, self.device, count, lengths, side)

    @final
    def next_packed(self, counts: Sequence[Mapping[int, int]], total: int | None = None) -> Tokens:
        """The tokens of the next chunk of packed rows: in row b, counts[b][d] tokens of each document d, numbered from
        where it ended, side by side in the order of counts[b]. A document that is new begins at 0.

        next_packed([{3: 1, 7: 4}]), where document 3 has seen 9 tokens: index 9 0 1 2 3, document 3 7 7 7 7.

        Args:
            counts: {document: tokens} of each row.
            total: slots of the chunk, T; those of the longest row unless given. The rest is empty.
        Raises:
            CacheError: numbers that do not fit.
        """
        return next_packed(self.documents, self.device, counts, total)

    # -- forgetting and copying ------------------------------------------------------------------------

    @final
    def trim(self, n: int | Sequence[int | Mapping[int, int]] | Tensor) -> None:
        """Forgets the last n tokens: of every row, n[b] of row b, or n[b][d] of document d of row b, which may be all
        of them, so that its slots are free.

        Raises CacheError when a sequence has seen fewer, or when what the tokens before them need is no longer
        held; nothing is then changed."""
        ends = trimmed(self.documents, n)
        for layer in self._all_layers():
            layer._check_trim(ends)
        for sequences in self._sequences:
            sequences.trim_to(ends)
        for table in self._tables:
            table.trim(ends)

    @final
    def fork(self) -> Self:
        """An independent copy: what happens to one is not seen in the other."""
        self._all_layers()
        with torch.inference_mode(False):
            return copy.deepcopy(self)

    @final
    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Row i becomes what row rows[i] was, for beams and for dropping finished rows; there may be more or
        fewer rows than before. Raises CacheError for a row that does not exist."""
        batch, layers = self.batch, self._all_layers()
        pick = torch.as_tensor(rows, dtype=torch.int64, device=self.device)
        chosen = pick.tolist()
        if pick.dim() != 1 or any(not 0 <= r < batch for r in chosen):
            raise CacheError(f"Cache.reorder: rows must be a list of numbers in 0..{batch - 1}, got {chosen}")
        _ = self.documents
        for sequences in self._sequences:
            sequences.select_rows(chosen)
        for table in self._tables:
            table.select_rows(pick)
        for layer in layers:
            layer._select_rows(pick)

    @final
    def reserve(self, tokens: int) -> None:
        """Makes room for rows of so many tokens at once, so that no later update has to; never shrinks."""
        for layer in self.layers:
            layer._reserve(tokens)

    @property
    def _sequences(self) -> list[SequenceLengths]:
        return list(dict.fromkeys(layer.sequences for layer in self.layers))

    @property
    def _tables(self) -> list[SlotTable]:
        return list(dict.fromkeys(layer.table for layer in self.layers if layer.table is not None))

    def _all_layers(self) -> Sequence[LayerCache]:
        """The layers. Raises CacheError where others share their tokens, which cannot be moved without them."""
        for sequences, here in Counter(layer.sequences for layer in self.layers).items():
            if sequences.layers != here:
                raise CacheError(
                    f"{type(self).__name__}: {here} of {sequences.layers} layers that share their lengths cannot be "
                    "trimmed, copied or reordered alone; use the DecoderCache that holds all of them"
                )
        return self.layers

    # -- what is stored --------------------------------------------------------------------------------

    @property
    @abstractmethod
    def slots(self) -> int:
        """The most slots that hold a token now, over the rows; summed over the layers."""

    @property
    @abstractmethod
    def bound(self) -> int | None:
        """The most slots that a row of as many documents and global tokens ever holds, however long it gets, summed
        over the layers; None when there is no such number."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of allocated keys and values, or of sums, in all layers."""


class LayerCache(Cache):
    """The past of one layer: keys and values (`KVCache`), or the sums of linear attention (`LinearAttentionCache`).

    The layers of a decoder share `sequences`, and layers that retain the same tokens share their `table`. The first
    layer that is given a chunk has it validated and placed; the others follow it.
    """

    table: SlotTable | None = None

    def __init__(self, sequences: SequenceLengths) -> None:
        self.sequences, self.steps = sequences, sequences.steps
        sequences.layers += 1

    @property
    def layers(self) -> Sequence[LayerCache]:
        """This one."""
        return (self,)

    @property
    def documents(self) -> Sequence[Documents]:
        """As in `Cache`."""
        sequences = self.sequences
        return sequences.rows if self.steps == sequences.steps else sequences.before

    def _chunk(self, tokens: Tokens) -> Chunk:
        """The chunk of these tokens. Raises CacheError where they do not go on where the rows ended, or are not what
        the layers before were given."""
        sequences = self.sequences
        if self.steps == sequences.steps:
            return sequences.append(tokens)
        chunk = sequences.chunk
        if chunk is None or self.steps + 1 < sequences.steps or not chunk.is_of(tokens):
            raise broken_off("a layer before", sequences.rows, "this one", self.documents)
        return chunk

    @abstractmethod
    def _check_trim(self, ends: Sequence[Documents]) -> None:
        """Raises CacheError when rows cannot go back to these lengths."""

    @abstractmethod
    def _select_rows(self, rows: Tensor) -> None:
        """Chooses rows of what the layer alone holds."""

    @abstractmethod
    def _reserve(self, tokens: int) -> None:
        """As `reserve`."""


@final
class KVCache(LayerCache):
    """The past keys and values of one layer.

    Law: for any way to cut a sequence into chunks, attending with each chunk's queries over the KeyValues that
    `update` returns for it equals attending over the whole sequence at once, for every pattern whose retention the
    table's policy keeps (`choose_cache`); for packed rows, document by document.

    A slot carries its token (index, document, is_global, position), and patterns read that, never a slot's number; an
    empty slot has index -1. What is said of a token is frozen when it is stored.

    Args:
        spec: what is stored.
        table: in which slots; its own, or that of a decoder's layers of equal policy.
    """

    table: SlotTable

    def __init__(self, spec: CacheSpec, table: SlotTable) -> None:
        super().__init__(table.lengths)
        self.table, self.storage = table, Storage(spec)

    @staticmethod
    def of(policy: SlotPolicy, spec: CacheSpec) -> KVCache:
        """The cache of one layer, alone, with slots by this policy."""
        return KVCache(spec, SlotTable(policy, SequenceLengths(spec.batch, spec.device)))

    def update(self, k: Tensor, v: Tensor, tokens: Tokens) -> KeyValues:
        """Stores a chunk and returns what its queries attend over: past and chunk, as one set of keys.

        Args:
            k: keys [B, K, T, D].  v: values [B, K, T, E].
            tokens: of the chunk, [B|1, T]. The indices of each document go on where it ended (`documents`); empty
                slots (index -1, padding) may stand anywhere, may hold anything and are not stored.
        Returns:
            KeyValues over S slots, in no order that one may rely on. They may be views of the cache: valid until
            its next change. `tokens.start` is set whenever the keys are in order, so that fast kernels apply.
        Raises:
            CacheError: shapes, dtype, device or indices do not fit, or gradients are asked for. The cache is then
                as it was.
        """
        self.storage.check(k, v, tokens.count)
        keys = self.storage.append(k, v, self.table.place(self._chunk(tokens)))
        self.steps = self.sequences.steps
        return keys

    def _check_trim(self, ends: Sequence[Documents]) -> None:
        self.table.check_trim(ends)

    def _select_rows(self, rows: Tensor) -> None:
        self.storage.select_rows(rows)

    def _reserve(self, tokens: int) -> None:
        self.table.grow(self.table.policy.most(tokens))
        self.storage.grow(self.table.slots)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is stored."""
        return self.storage.dtype

    @property
    def slots(self) -> int:
        """The most slots that hold a token now, over the rows."""
        return self.table.held

    @property
    def capacity(self) -> int:
        """Slots that memory is allocated for now, per row."""
        return self.storage.slots

    @property
    def bound(self) -> int | None:
        """As in `Cache`: `SlotTable.bound`."""
        return self.table.bound

    @property
    def nbytes(self) -> int:
        """Bytes of allocated keys and values: `Storage.nbytes`."""
        return self.storage.nbytes

    def __repr__(self) -> str:
        b, k, _, d = self.storage.tensors[0].shape
        return (
            f"KVCache({self.table.policy.name}, batch={b}, kv_heads={k}, head_dim={d}, lengths={list(self.lengths)}, "
            f"capacity={self.capacity}, bound={self.bound}, {self.dtype})"
        )


def broken_off(
    first: str, before: Sequence[Documents], second: str, after: Sequence[Documents]
) -> CacheError:
    """The error of layers that have not seen the same tokens."""
    one, other = ([sum(row.values()) for row in rows] for rows in (before, after))
    return CacheError(
        f"DecoderCache: {first} has seen {one} tokens per row, {second} {other}: a forward pass was broken off between "
        "them; start with a new cache, or fork() before a pass that may fail"
    )
