"""Rows for encoders: every stretch of text stands within the tokenizer's template, [CLS] text [SEP]."""

# Legend: B rows, L slots of a row.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.data.masking import Masking
from headway.data.order import keyed
from headway.data.packing import IGNORED, apart, pack
from headway.data.tokenfile import TokenFile
from headway.errors import DataError
from headway.tokens import Tokens


class FramedRows:
    """Rows of `length` slots over a token file of plain text: `len(rows)`, `rows[i]`.

    A document that does not fit is cut, and each part has the template around it, so that what a model reads first is
    always what the template begins with. The parts of a row do not see each other (`Tokens.packed`).

    Args:
        file: ids without a template (`encode_corpus(..., bos=False, eos=False)`).
        length: slots of a row, those of the template included.
        prefix: what the template puts before a text. suffix: and after it.
        packed: parts of several documents side by side; False is one part a row, the rest of the row being empty.
    Raises DataError for rows that have no room, and for a file whose documents have the template already.
    """

    def __init__(
        self,
        file: TokenFile,
        length: int,
        *,
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        packed: bool = True,
    ) -> None:
        self.file, self.length = file, length
        self.prefix, self.suffix = np.asarray(prefix, np.int64), np.asarray(suffix, np.int64)
        if len(prefix) and file.documents and file.document(0)[: len(prefix)].tolist() == [*prefix]:
            raise DataError(
                f"{file.path}: its documents begin with {[*prefix]}, which the tokenizer's template puts there once "
                "more; encode the text with bos=False, eos=False"
            )
        begins = np.concatenate([[0], np.asarray(file.ends, np.int64)])
        lay = pack if packed else apart
        first, parts = [0], []
        for row in lay(np.diff(begins).tolist(), length, len(prefix) + len(suffix)):
            parts += [(begins[span.document] + span.start, begins[span.document] + span.stop) for span in row]
            first.append(len(parts))
        self._first, self._parts = np.array(first), np.array(parts, np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, i: int) -> tuple[NDArray[np.int64], list[int]]:
        """ids of the row's tokens, one part after the other, and how many each part has, template included."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        found: list[NDArray[np.int64]] = []
        lengths: list[int] = []
        for begin, end in self._parts[self._first[i] : self._first[i + 1]]:
            text = np.asarray(self.file.tokens[begin:end], np.int64)
            found += [self.prefix, text, self.suffix]
            lengths.append(len(self.prefix) + len(text) + len(self.suffix))
        return np.concatenate(found), lengths


@dataclass(frozen=True, eq=False)
class MaskedRows:
    """Rows with tokens to be found: `len(rows)`, `rows.batch([..])`.

    What is masked in row i is a function of (seed, draw, i): another draw is another mask, an equal one the same,
    whatever else is in the batch.
    """

    rows: FramedRows
    masking: Masking
    seed: int = 0
    draw: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def file(self) -> TokenFile:
        """Where the text is from."""
        return self.rows.file

    def drawn(self, draw: int) -> MaskedRows:
        """The same rows with another mask."""
        return replace(self, draw=draw)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tokens]:
        """ids [B, L] (0 in empty slots), targets [B, L] (-100 where nothing is to be found), and the tokens'
        description, for the given rows."""
        total = self.rows.length
        ids = np.zeros((len(indices), total), np.int64)
        targets = np.full((len(indices), total), IGNORED, np.int64)
        lengths = []
        for b, i in enumerate(indices):
            row, parts = self.rows[i]
            ids[b, : len(row)], targets[b, : len(row)] = self.masking(row, keyed(self.seed, self.draw, i))
            lengths.append(parts)
        return torch.from_numpy(ids), torch.from_numpy(targets), Tokens.packed(lengths, total=total)
