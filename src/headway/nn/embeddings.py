"""Embeddings of token ids, and of positions that are added to them.

Legend: B rows, T slots, M width of the model.
"""

import torch
from torch import Tensor, nn

from headway.errors import DataError
from headway.nn.kept import Keeps
from headway.nn.share import Share, placed
from headway.positions import PositionScheme
from headway.tokens import Tokens


class TokenEmbedding(Keeps, nn.Embedding):
    """A trained table with one row for each of `vocab` ids, which may be quantized. The ids of empty slots are
    ignored. If ranks `share` the rows, each looks up the ids that it has, and the result is the sum over ranks, of
    which only one is not 0."""

    empty: Tensor
    share: Share | None = None

    def forward(self, ids: Tensor, tokens: Tokens | None = None) -> Tensor:
        """Looks up the rows of ids [B, T]: [B, T, M].

        Raises DataError if the id of a token is not in 0..vocab-1, or if `ids` are not whole numbers [B, T].
        """
        return self.rows(self.checked(ids, tokens))

    @property
    def vocab(self) -> int:
        """Number of ids."""
        return self.num_embeddings * (1 if self.share is None else self.share.tensor.exchange.ranks)

    def rows(self, ids: Tensor) -> Tensor:
        """Returns the rows of ids, which must all be in the vocabulary."""
        if self.share is None:
            return self._own_rows(ids)
        at, here = placed(ids, self.share.part(self.vocab))
        return self.share.tensor.leave(self._own_rows(at).masked_fill(~here[..., None], 0.0))

    def _own_rows(self, at: Tensor) -> Tensor:
        return super().forward(at) if self._form is None else self.kept.rows(at).to(self.like.dtype)

    def divide(self, share: Share) -> None:
        """Keeps only a rank's rows, in place."""
        local = share.part(self.num_embeddings)
        self.keep(self.kept.part(0, local))
        self.num_embeddings, self.share = len(local), share

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of the rows: the table itself, or an empty tensor if the table is
        quantized."""
        return self.empty if self.weight is None else self.weight

    def vacate(self) -> None:
        """See `Keeps`."""
        if self.weight is not None:
            self.register_buffer("empty", self.weight.detach().new_empty(0), persistent=False)
        super().vacate()

    def checked(self, ids: Tensor, tokens: Tokens | None) -> Tensor:
        """Returns the ids with 0 in empty slots; raises as `forward` does."""
        check_ids(ids)
        if tokens is not None and tokens.start is None:
            ids = torch.where(tokens.valid, ids, 0)
        if not torch.compiler.is_compiling() and not ids.is_meta and ids.numel():
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.vocab:
                self._refuse(ids)
        return ids

    def _refuse(self, ids: Tensor) -> None:
        wrong = (ids < 0) | (ids >= self.vocab)
        row, slot = wrong.nonzero()[0].tolist()
        more = int(wrong.sum()) - 1
        raise DataError(
            f"token id {int(ids[row, slot])} (row {row}, slot {slot}{f', and {more} more' if more else ''}) is "
            f"not in 0..{self.vocab - 1}: the model's vocab is {self.vocab}; use the "
            "tokenizer that the model was trained with, and mark padding in `tokens` instead of by an id"
        )


def check_ids(ids: Tensor) -> None:
    """Raises DataError unless `ids` are whole numbers [B, T]."""
    if ids.dim() != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DataError(
            f"token ids must be whole numbers [batch, tokens], got {ids.dtype} {list(ids.shape)}"
            + ("; add the batch axis: ids[None]" if ids.dim() == 1 else "")
        )


class PositionEmbedding(nn.Module):
    """Position vectors that a scheme adds to embeddings: rows of a trained table (`Learned`), fixed vectors
    (`Sinusoidal`), or nothing."""

    def __init__(self, positions: PositionScheme, width: int) -> None:
        super().__init__()
        self.positions, self.width = positions, width
        rows = positions.rows
        self.weight = nn.Parameter(nn.init.normal_(torch.empty(rows, width), 0, 0.02)) if rows else None

    def forward(self, x_BTM: Tensor, tokens: Tokens) -> Tensor:
        """Returns x plus the vectors of `tokens.positions`; positions of empty slots are ignored."""
        if self.positions.marks != "embeddings":
            return x_BTM
        at = torch.where(tokens.valid, tokens.positions, 0)
        if self.weight is not None:
            return x_BTM + nn.functional.embedding(self.positions.row(at), self.weight)
        return x_BTM + self.positions.embedding(at, self.width, x_BTM.dtype)
