"""Per-slot metadata of an attention call: everything about attention that depends on the data.

Legend: B rows, N slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import torch
from torch import Tensor

from headway.errors import PatternError, check_known


@dataclass(frozen=True, eq=False)
class Tokens:
    """One side (queries or keys) of an attention call, slot by slot.

    Attributes:
        index: order within the document, from 0; -1 marks an empty slot.  int64 [B|1, N]
        document: number of the document in a packed row; None means one document per row.  int64 [B|1, N]
        is_global: Longformer's global tokens, per example; None means none.  bool [B|1, N]
        position: what rotations and position embeddings are computed from; None means `index`.  int64 [B|1, N]
        start: not None if it is known without reading data that every row is start, start+1, ..., in one document,
            without empty slots. Fast kernels are chosen by it.

    Invariant: documents never attend to each other, and no query or key is an empty slot. (document, index) is unique
    in a row. One row stands for all rows of a batch (B = 1 broadcasts).
    """

    index: Tensor
    document: Tensor | None = None
    is_global: Tensor | None = None
    position: Tensor | None = None
    start: int | None = None

    def __post_init__(self) -> None:
        assert self.index.dim() == 2, f"Tokens.index must be [B, N], got {tuple(self.index.shape)}"
        for name in ("document", "is_global", "position"):
            value = getattr(self, name)
            if value is not None and value.shape[-1] != self.index.shape[-1]:
                raise PatternError(
                    f"Tokens: {name} describes {value.shape[-1]} slots, index {self.index.shape[-1]}; "
                    "give both one value per slot"
                )

    # -- constructors ------------------------------------------------------------------------------------

    @staticmethod
    def range(count: int, start: int = 0, device: torch.device | str | None = None) -> "Tokens":
        """Returns `count` tokens of one document, numbered from `start`; one row that stands for the batch."""
        return Tokens(torch.arange(start, start + count, device=device).unsqueeze(0), start=start)

    @staticmethod
    def from_lengths(
        lengths: Sequence[int] | Tensor, total: int | None = None, side: str = "right"
    ) -> "Tokens":
        """Returns tokens with `lengths[b]` tokens in row b; the other slots up to `total` are empty, on the given
        `side`."""
        values = torch.as_tensor(lengths)
        if values.dim() != 1 or values.numel() == 0:
            raise PatternError(
                f"Tokens.from_lengths: lengths must be [rows], got shape {tuple(values.shape)}"
            )
        if values.is_floating_point() or values.dtype == torch.bool:
            raise PatternError(f"Tokens.from_lengths: lengths must be whole numbers, got {values.tolist()}")
        count = values.long()
        check_known(side, ("left", "right"), "Tokens.from_lengths: there is no side", error=PatternError)
        longest = int(count.max())
        total = longest if total is None else total
        if int(count.min()) < 0 or longest > total:
            raise PatternError(f"Tokens.from_lengths: lengths must lie in 0..{total}, got {count.tolist()}")
        slot = torch.arange(total, device=count.device).unsqueeze(0)
        index = slot - (total - count).unsqueeze(1) if side == "left" else slot.expand(len(count), total)
        index = torch.where((index >= 0) & (index < count.unsqueeze(1)), index, -1)
        start = 0 if bool((count == total).all()) else None
        return Tokens(index, start=start)

    @staticmethod
    def from_attention_mask(mask: Tensor) -> "Tokens":
        """Returns tokens for a padding mask [B, N]: 1 (True) is a token, 0 (False) padding, anywhere in the row."""
        if mask.dim() != 2:
            raise PatternError(
                "Tokens.from_attention_mask: mask must have shape [batch, slots], "
                f"got {tuple(mask.shape)}; pass a mask over (query, key) pairs as keep= of attend"
            )
        if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
            raise PatternError(
                "Tokens.from_attention_mask: mask must hold only 0 (padding) and 1 (token); "
                "pass an additive mask (0 and -inf) as mask == 0"
            )
        real = mask.bool()
        index = torch.where(real, real.cumsum(1) - 1, -1)
        return Tokens(index, start=0 if bool(real.all()) else None)

    @staticmethod
    def packed(
        lengths: Sequence[int] | Sequence[Sequence[int]],
        total: int | None = None,
        device: torch.device | str | None = None,
    ) -> "Tokens":
        """Returns packed documents: `lengths` of one row, or a list of lengths per row; slots up to `total` are
        empty."""
        rows = _by_row(lengths)
        if not rows or any(n < 0 for row in rows for n in row):
            raise PatternError(f"Tokens.packed: lengths of documents must be 0 or more, got {lengths!r}")
        total = max(sum(row) for row in rows) if total is None else total
        index = torch.full((len(rows), total), -1, dtype=torch.int64)
        document = torch.full((len(rows), total), -1, dtype=torch.int64)
        for b, row in enumerate(rows):
            if sum(row) > total:
                raise PatternError(f"Tokens.packed: row {b} needs {sum(row)} slots, but total is {total}")
            at = 0
            for d, n in enumerate(row):
                index[b, at : at + n] = torch.arange(n)
                document[b, at : at + n] = d
                at += n
        is_single = all(row and row[0] == total for row in rows)
        return Tokens(
            index.to(device), None if is_single else document.to(device), start=0 if is_single else None
        )

    # -- the same tokens with other attributes -------------------------------------------------------------

    def with_global(self, which: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> "Tokens":
        """Marks global tokens: a bool mask [B|1, N] over slots, indices for all rows, or a list of indices per row.

        Indices are token indices (0 is the document's first token, wherever the padding is). Raises PatternError for an
        index that a row does not have, and for a mask that marks an empty slot.
        """
        if isinstance(which, Tensor):
            wrong = which.dtype != torch.bool or which.dim() != 2 or which.shape[1] != self.count
            if wrong or 1 < len(which) != self.rows > 1:
                raise PatternError(
                    f"Tokens.with_global: a mask must be bool [rows, slots] = {[self.rows, self.count]}, "
                    f"got {which.dtype} {tuple(which.shape)}"
                )
            if bool((which & ~self.valid).any()):
                raise PatternError("Tokens.with_global: the mask marks empty slots (padding) as global")
            return replace(self, is_global=which)
        per_row = _by_row(which)
        rows = max(self.rows, len(per_row))
        if len(per_row) not in (1, rows) or self.rows not in (1, rows):
            raise PatternError(f"Tokens.with_global: {len(per_row)} lists of indices for {self.rows} rows")
        index = self.index.expand(rows, -1)
        mask = torch.zeros_like(index, dtype=torch.bool)
        for b, indices in enumerate(per_row * (rows if len(per_row) == 1 else 1)):
            for n in indices:
                hits = index[b] == n
                if n < 0 or not bool(hits.any()):
                    raise PatternError(f"Tokens.with_global: row {b} has no token with index {n}")
                mask[b] |= hits
        return replace(self, is_global=mask)

    def with_position(self, position: Tensor) -> "Tokens":
        """Returns the same tokens at these positions [B|1, N] (RoBERTa's offset, `position_ids`, tree drafts)."""
        if position.dim() != 2 or position.is_floating_point():
            raise PatternError(
                f"Tokens.with_position: positions must be integers [rows, slots], got {position.dtype} "
                f"{tuple(position.shape)}"
            )
        return replace(self, position=position)

    # -- properties ----------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        fields = (self.index, self.document, self.is_global, self.position)
        return max([t.shape[0] for t in fields if t is not None])

    @property
    def count(self) -> int:
        """The number of slots per row, N."""
        return self.index.shape[1]

    @property
    def device(self) -> torch.device:
        return self.index.device

    @property
    def static_key(self) -> tuple[int, int] | None:
        """(start, count) if they determine all that a pattern reads: one document, no empty slots, no global tokens.

        Results that depend on two sides with such keys may be cached by them. None if the data must be read."""
        if self.start is None or self.document is not None or self.is_global is not None:
            return None
        return self.start, self.index.shape[1]

    @property
    def versions(self) -> tuple[int, ...] | None:
        """How often each tensor that a pattern reads was changed in place; None if torch does not count (inference
        tensors)."""
        tensors = [t for t in (self.index, self.document, self.is_global) if t is not None]
        return None if any(t.is_inference() for t in tensors) else tuple(t._version for t in tensors)

    @property
    def valid(self) -> Tensor:
        """bool [B|1, N]: False if the slot is empty."""
        return self.index >= 0

    @property
    def documents(self) -> Tensor:
        return torch.zeros_like(self.index) if self.document is None else self.document

    @property
    def globals(self) -> Tensor:
        return torch.zeros_like(self.index, dtype=torch.bool) if self.is_global is None else self.is_global

    @property
    def positions(self) -> Tensor:
        return self.index if self.position is None else self.position

    # -- slots ---------------------------------------------------------------------------------------------

    def slice(self, begin: int, end: int) -> "Tokens":
        """Returns slots begin..end-1."""
        start = None if self.start is None else self.start + begin
        return self.map(lambda t: t[:, begin:end], start)

    def gather(self, slots: Tensor) -> "Tokens":
        """Returns the slots `slots` [B|1, M] of each row, in that order."""
        rows = max(self.rows, slots.shape[0])
        at = slots.expand(rows, -1)
        return self.map(lambda t: t.expand(rows, -1).gather(1, at), None)

    def expand(self, rows: int) -> "Tokens":
        """Expands one row to `rows` rows (views); unchanged if there are as many already."""
        return self.map(lambda t: t.expand(rows, -1), self.start)

    def select_rows(self, rows: Tensor) -> "Tokens":
        """Returns the rows `rows` [R], in that order (a row that stood for all stays one row)."""
        return self.map(lambda t: t if t.shape[0] == 1 else t.index_select(0, rows), self.start)

    def to(self, device: torch.device | str) -> "Tokens":
        return self.map(lambda t: t.to(device), self.start)

    @staticmethod
    def cat(parts: "Sequence[Tokens]") -> "Tokens":
        """Concatenates the slots of several `Tokens`."""
        assert parts, "Tokens.cat needs at least one part"
        if len(parts) == 1:
            return parts[0]
        rows = max(part.rows for part in parts)
        joined = {
            name: torch.cat([getattr(part, filled).expand(rows, -1) for part in parts], 1)
            for name, filled in _FILLED.items()
            if any(getattr(part, name) is not None for part in parts)
        }
        contiguous = all(
            part.start is not None and part.start + part.count == following.start
            for part, following in pairwise(parts)
        )
        return Tokens(**joined, start=parts[0].start if contiguous else None)

    def map(self, change: Callable[[Tensor], Tensor], start: int | None = None) -> "Tokens":
        """Applies `change` to every field; pass `start` if the result is known to be start, start+1, ..."""
        fields = (self.index, self.document, self.is_global, self.position)
        index, document, is_global, position = (None if t is None else change(t) for t in fields)
        assert index is not None
        return Tokens(index, document, is_global, position, start)


def take_slots(x: Tensor, slots: Tensor, dim: int = 2) -> Tensor:
    """Returns x at the slots `slots` [B|1, M] along `dim`, in that order; rows are along dim 0."""
    shape, size = [1] * x.dim(), list(x.shape)
    shape[0], shape[dim] = slots.shape
    size[dim] = slots.shape[1]
    return x.gather(dim, slots.view(shape).expand(size))


_FILLED = {"index": "index", "document": "documents", "is_global": "globals", "position": "positions"}
"""The fields with one value per slot, and the properties that replace them if they are None."""


@dataclass(frozen=True, eq=False)
class SlotSelection:
    """Some slots of every row, `at` [B, N], and their tokens."""

    at: Tensor
    tokens: Tokens

    @staticmethod
    def of(tokens: Tokens, at: Tensor) -> "SlotSelection":
        """Selects the slots `at` of each row; if they are the same contiguous run in all rows, `start` stays known."""
        first, count = int(at[0, 0]) if at.numel() else 0, at.shape[1]
        contiguous = torch.arange(first, first + count, device=at.device)
        same = bool((at == contiguous).all())
        return SlotSelection(at, tokens.slice(first, first + count) if same else tokens.gather(at))

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Returns x at these slots along `dim`; x has all slots there, and rows along dim 0."""
        return take_slots(x, self.at, dim)


def _by_row(numbers: Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns numbers as a list per row, given those of one row or of several."""
    rows = [[n] if isinstance(n, int) else list(n) for n in numbers]
    return [list(chain(*rows))] if all(isinstance(n, int) for n in numbers) else rows
