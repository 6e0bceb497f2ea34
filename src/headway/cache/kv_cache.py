"""The cache of one layer of softmax attention: keys and values in the slots of a table.

Legend: B rows, K kv heads, T slots of a chunk, S slots, D per key, E per value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from headway.attention import KeyValues
from headway.cache.layer_cache import LayerCache
from headway.cache.policy import SlotPolicy
from headway.cache.sequences import Documents, SequenceLengths
from headway.cache.spec import CacheSpec
from headway.cache.table import Placement, SlotTable
from headway.errors import CacheError
from headway.tokens import Tokens


@final
class KVCache(LayerCache):
    """The past keys and values of one layer.

    Law: for any way to cut a sequence into chunks, attending with each chunk's queries over the KeyValues that
    `update` returns for it equals attending over the whole sequence at once, for every pattern whose retention the
    table's policy keeps (`choose_cache`); for packed rows, document by document.

    A slot carries its token (index, document, is_global, position), and patterns read that, never a slot's number; an
    empty slot has index -1. What is said of a token is frozen when it is stored. New memory is zeros, so that what was
    never written cannot hold NaN; tensors are made outside inference mode, so that a cache filled there can be
    continued elsewhere.

    Args:
        spec: what is stored.
        table: in which slots; its own, or that of a decoder's layers of equal policy.

    Attributes:
        tensors: k [B, K, S, D], v [B, K, S, E]; in int8 also their scales, float32 [B, K, S] (`headway.quantization`).
    """

    table: SlotTable

    def __init__(self, spec: CacheSpec, table: SlotTable) -> None:
        super().__init__(table.lengths)
        self.table = table
        shape = (spec.batch, spec.kv_heads, 0)
        with torch.inference_mode(False):
            self.tensors: tuple[Tensor, ...] = tuple(
                torch.zeros(*shape, size, dtype=spec.dtype, device=spec.device)
                for size in (spec.head_dim, spec.value_size)
            )
            if spec.dtype == torch.int8:
                self.tensors += tuple(torch.zeros(shape, device=spec.device) for _ in "kv")

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
        self._check("k", k, self.tensors[0], tokens.count)
        self._check("v", v, self.tensors[1], tokens.count)
        placement = self.table.place(self._chunk(tokens))
        given = (k, v) if len(self.tensors) == 2 else KeyValues(k, v, tokens).quantized().tensors
        self._grow()
        if placement.past is None:
            self._write(given, placement)
            seen = [own.narrow(2, 0, placement.tokens.count) for own in self.tensors]
        else:
            seen = []
            for own, some in zip(self.tensors, given, strict=True):
                past = [own.narrow(2, run.slot, run.length) for run in placement.past]
                seen.append(torch.cat([*past, some], 2) if past else some)
            self._write(given, placement)
        self.seen = self.sequences.rows
        return KeyValues(seen[0], seen[1], placement.tokens, *seen[2:])

    def place(self, tokens: Tokens) -> Placement:
        """Makes room for a chunk and says where its keys and values go, which whoever asks writes there himself, in
        every row, before the cache is used again. Raises CacheError as `update` does."""
        placement = self.table.place(self._chunk(tokens))
        self._grow()
        self.seen = self.sequences.rows
        return placement

    def _check(self, name: str, given: Tensor, own: Tensor, count: int) -> None:
        """Raises CacheError unless `given` [B, K, count, D or E] can be stored."""
        batch, heads, _, size = own.shape
        if given.shape != (batch, heads, count, size):
            raise CacheError(
                f"Cache.update: {name} must be [batch, kv_heads, tokens, size] = {[batch, heads, count, size]} "
                f"for this cache and these {count} tokens, got {list(given.shape)}"
            )
        int8 = own.dtype == torch.int8
        fits = given.is_floating_point() if int8 else given.dtype == own.dtype
        if not fits or given.device != own.device:
            what = "rounds floating-point numbers to" if int8 else "holds"
            raise CacheError(
                f"Cache.update: {name} is {given.dtype} on {given.device}, the cache {what} {own.dtype} "
                f"on {own.device}; make the cache with the dtype and device of the keys"
            )
        if given.requires_grad and torch.is_grad_enabled():
            raise CacheError(
                f"Cache.update: {name} requires a gradient, and a cache holds none: decode under "
                "torch.no_grad() or torch.inference_mode(), or train without a cache"
            )

    def _write(self, given: Sequence[Tensor], placement: Placement) -> None:
        for own, some in zip(self.tensors, given, strict=True):
            for (rows, slots), taken in placement.writes:
                if taken is not None:
                    own[rows, :, slots] = some[taken[0], :, taken[1]]
                else:  # tensors as indices put the dimensions of rows and slots first: [B, T, K, D]
                    own[rows, :, slots] = some if isinstance(slots, slice) else some.transpose(1, 2)

    def _grow(self) -> None:
        """As many slots as the table has; the new ones are zeros."""
        more = self.table.tokens.count - self.tensors[0].shape[2]
        if more:
            with torch.inference_mode(False):
                self.tensors = tuple(pad(t, (0, 0) * (t.dim() - 3) + (0, more)) for t in self.tensors)

    def reserve(self, tokens: int) -> None:
        self.table.grow(self.table.policy.most(tokens))
        self._grow()

    def _check_trim(self, ends: Sequence[Documents]) -> None:
        self.table.check_trim(ends)

    def _select_rows(self, rows: Tensor) -> None:
        with torch.inference_mode(False):
            self.tensors = tuple(t.index_select(0, rows) for t in self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is stored."""
        return self.tensors[0].dtype

    @property
    def slots(self) -> int:
        """The most slots that hold a token now, over the rows."""
        return max(self.table.tokens.valid.sum(1).tolist(), default=0)

    @property
    def capacity(self) -> int:
        """Slots that memory is allocated for now, per row."""
        return self.tensors[0].shape[2]

    @property
    def bound(self) -> int | None:
        return self.table.bound

    @property
    def nbytes(self) -> int:
        """(D + E) B K S bytes per number; in int8 with scales, (D + E + 8) B K S."""
        return sum(t.nbytes for t in self.tensors)

    def __repr__(self) -> str:
        b, k, _, d = self.tensors[0].shape
        return (
            f"KVCache({self.table.policy.name}, batch={b}, kv_heads={k}, head_dim={d}, lengths={list(self.lengths)}, "
            f"capacity={self.capacity}, bound={self.bound}, {self.dtype})"
        )
