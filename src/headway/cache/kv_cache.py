"""The cache of one layer of softmax attention: keys and values in the slots of a table.

Legend: B rows, K kv heads, T slots of a chunk, S slots attended over, D per key, E per value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from headway.attention import KeyValues
from headway.cache.layer_cache import LayerCache
from headway.cache.lengths import Documents, SequenceLengths
from headway.cache.policy import SlotPolicy
from headway.cache.spec import CacheSpec
from headway.cache.storage import Storage
from headway.cache.table import SlotTable
from headway.tokens import Tokens


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
