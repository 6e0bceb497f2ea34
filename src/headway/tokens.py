"""The facts about each slot of a row: everything about attention that depends on data.

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
        document: which document of a packed row; None means one document per row.  int64 [B|1, N]
        is_global: Longformer's global tokens, per example; None means none.  bool [B|1, N]
        position: what angles and embeddings are computed from; None means `index`.  int64 [B|1, N]
        start: when not None, it is known without looking at data that every row is start, start+1, ..., in
            one document, with no empty slot. Fast kernels are chosen from it.

    Law: documents never see each other, and nothing sees or is an empty slot. (document, index) is unique in
    a row. One row stands for all rows of a batch (B = 1 broadcasts).
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
        """`count` tokens of one document, numbered from `start`; one row that stands for the batch."""
        return Tokens(torch.arange(start, start + count, device=device).unsqueeze(0), start=start)

    @staticmethod
    def from_lengths(
        lengths: Sequence[int] | Tensor, total: int | None = None, side: str = "right"
    ) -> "Tokens":
        """Row b has `lengths[b]` tokens; the slots up to `total` are empty, on the right or left `side`."""
        values = torch.as_tensor(lengths)
        if values.dim() != 1 or values.numel() == 0:
            raise PatternError(f"Tokens.from_lengths: one length per row, got shape {tuple(values.shape)}")
        if values.is_floating_point() or values.dtype == torch.bool:
            raise PatternError(f"Tokens.from_lengths: lengths are whole numbers, got {values.tolist()}")
        count = values.long()
        check_known(side, ("left", "right"), "Tokens.from_lengths: there is no side", error=PatternError)
        most = int(count.max())
        total = most if total is None else total
        if int(count.min()) < 0 or most > total:
            raise PatternError(f"Tokens.from_lengths: lengths must lie in 0..{total}, got {count.tolist()}")
        slot = torch.arange(total, device=count.device).unsqueeze(0)
        index = slot - (total - count).unsqueeze(1) if side == "left" else slot.expand(len(count), total)
        index = torch.where((index >= 0) & (index < count.unsqueeze(1)), index, -1)
        start = 0 if bool((count == total).all()) else None
        return Tokens(index, start=start)

    @staticmethod
    def from_attention_mask(mask: Tensor) -> "Tokens":
        """From the ecosystem's mask [B, N]: 1 (True) is a token, 0 (False) padding, anywhere in the row."""
        if mask.dim() != 2:
            raise PatternError(
                "Tokens.from_attention_mask: a mask of shape [batch, slots] is needed, "
                f"got {tuple(mask.shape)}; masks over (query, key) pairs are patterns, or `keep` of attend"
            )
        if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
            raise PatternError(
                "Tokens.from_attention_mask: values are 0 (padding) and 1 (token); this mask has others: "
                "an additive mask (0 and -inf) must be turned into `mask == 0` first"
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
        """Documents side by side: `lengths` of one row, or one list of lengths per row; the rest is empty."""
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
        alone = all(row and row[0] == total for row in rows)
        return Tokens(index.to(device), None if alone else document.to(device), start=0 if alone else None)

    # -- the same tokens with more said ---------------------------------------------------------------------

    def with_global(self, which: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> "Tokens":
        """Marks global tokens: a bool mask [B|1, N] over slots, indices for all rows, or a list per row.

        Indices are token indices (0 is the first token of the document wherever padding is). An index that a
        row does not have is an error; a mask that marks an empty slot is one, too.
        """
        if isinstance(which, Tensor):
            if which.dtype != torch.bool or which.dim() != 2:
                raise PatternError(
                    "Tokens.with_global: a tensor must be bool [rows, slots], "
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
        """The same tokens at these positions [B|1, N] (RoBERTa's offset, `position_ids`, tree drafts)."""
        if position.dim() != 2 or position.is_floating_point():
            raise PatternError(
                f"Tokens.with_position: integer positions [rows, slots] are needed, got {position.dtype} "
                f"{tuple(position.shape)}"
            )
        return replace(self, position=position)

    # -- what is known -------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        fields = (self.index, self.document, self.is_global, self.position)
        return max([t.shape[0] for t in fields if t is not None])

    @property
    def count(self) -> int:
        """Slots per row, N."""
        return self.index.shape[1]

    @property
    def device(self) -> torch.device:
        return self.index.device

    @property
    def static_key(self) -> tuple[int, int] | None:
        """(start, count) where these say all that a pattern reads: one document, no empty slot, no global token. What
        follows from two sides that have one may be remembered by it. None where data must be looked at."""
        if self.start is None or self.document is not None or self.is_global is not None:
            return None
        return self.start, self.index.shape[1]

    @property
    def versions(self) -> tuple[int, ...] | None:
        """How often each tensor that a pattern reads was changed in place; None where torch does not count."""
        tensors = [t for t in (self.index, self.document, self.is_global) if t is not None]
        return None if any(t.is_inference() for t in tensors) else tuple(t._version for t in tensors)

    @property
    def valid(self) -> Tensor:
        """bool [B|1, N]: False where the slot is empty."""
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
        """Slots begin..end-1."""
        start = None if self.start is None else self.start + begin
        return self.map(lambda t: t[:, begin:end], start)

    def gather(self, slots: Tensor) -> "Tokens":
        """The slots `slots` [B|1, M] of each row, in that order."""
        rows = max(self.rows, slots.shape[0])
        at = slots.expand(rows, -1)
        return self.map(lambda t: t.expand(rows, -1).gather(1, at), None)

    def expand(self, rows: int) -> "Tokens":
        """One row written out as `rows` rows (views); no change when there are as many already."""
        return self.map(lambda t: t.expand(rows, -1), self.start)

    def select_rows(self, rows: Tensor) -> "Tokens":
        """The given rows [R], in that order (a row that stood for all stays one row)."""
        return self.map(lambda t: t if t.shape[0] == 1 else t.index_select(0, rows), self.start)

    def to(self, device: torch.device | str) -> "Tokens":
        return self.map(lambda t: t.to(device), self.start)

    @staticmethod
    def cat(parts: "Sequence[Tokens]") -> "Tokens":
        """Slots of several descriptions side by side."""
        assert parts, "Tokens.cat needs at least one part"
        if len(parts) == 1:
            return parts[0]
        rows = max(p.rows for p in parts)
        joined = {
            name: torch.cat([getattr(p, filled).expand(rows, -1) for p in parts], 1)
            for name, filled in _FILLED.items()
            if any(getattr(p, name) is not None for p in parts)
        }
        follow = all(p.start is not None and p.start + p.count == after.start for p, after in pairwise(parts))
        return Tokens(**joined, start=parts[0].start if follow else None)

    def map(self, change: Callable[[Tensor], Tensor], start: int | None = None) -> "Tokens":
        """Every field changed alike; `start` says whether the result is known to be start, start+1, ..."""
        fields = (self.index, self.document, self.is_global, self.position)
        index, document, is_global, position = (None if t is None else change(t) for t in fields)
        assert index is not None
        return Tokens(index, document, is_global, position, start)


def take_slots(x: Tensor, slots: Tensor, dim: int = 2) -> Tensor:
    """x with the slots `slots` [B|1, M] along `dim`, in that order; rows are along dim 0."""
    shape, size = [1] * x.dim(), list(x.shape)
    shape[0], shape[dim] = slots.shape
    size[dim] = slots.shape[1]
    return x.gather(dim, slots.view(shape).expand(size))


_FILLED = {"index": "index", "document": "documents", "is_global": "globals", "position": "positions"}
"""The fields of every slot, and the properties that give them where they are None."""


@dataclass(frozen=True, eq=False)
class SlotSelection:
    """Some slots of every row, `at` [B, N], and their tokens."""

    at: Tensor
    tokens: Tokens

    @staticmethod
    def of(tokens: Tokens, at: Tensor) -> "SlotSelection":
        """The slots `at` of rows of `tokens`; of neighbours that are the same in all rows, `start` stays known."""
        first, count = int(at[0, 0]) if at.numel() else 0, at.shape[1]
        run = torch.arange(first, first + count, device=at.device)
        same = bool((at == run).all())
        return SlotSelection(at, tokens.slice(first, first + count) if same else tokens.gather(at))

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """The same slots of x, which has all of them along `dim`, and rows along dim 0."""
        return take_slots(x, self.at, dim)


def _by_row(numbers: Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    """Numbers of one row, or of several, row by row."""
    rows = [[n] if isinstance(n, int) else list(n) for n in numbers]
    return [list(chain(*rows))] if all(isinstance(n, int) for n in numbers) else rows
