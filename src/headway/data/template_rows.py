"""Rows for encoders: every stretch of text stands within the tokenizer's template, [CLS] text [SEP]."""

# Legend: B rows, L slots of a row.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.masking import SHARE, Masking
from headway.data.order import keyed
from headway.data.packing import Batch, apart, pack
from headway.data.tokenfile import TokenFile
from headway.errors import DataError
from headway.nn import IGNORE_INDEX
from headway.text import Tokenizer
from headway.tokens import Tokens

HELD_OUT = -1  # the draw of every evaluation: steps are numbered from 0


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
    whatever else is in the batch. With `global_first` the first token of each text, [CLS], is global.
    """

    rows: FramedRows
    masking: Masking
    seed: int = 0
    draw: int = 0
    global_first: bool = False
    covers_text: ClassVar[bool] = False

    @staticmethod
    def of(
        file: TokenFile,
        length: int,
        tokenizer: Tokenizer,
        *,
        share: float = SHARE,
        whole_words: bool = False,
        packed: bool = True,
        seed: int = 0,
        draw: int = HELD_OUT,
        global_first: bool = False,
    ) -> MaskedRows:
        """For a tokenizer, its template and its mask; arguments and errors as in `FramedRows` and `Masking.of`."""
        template = tokenizer.template
        rows = FramedRows(file, length, prefix=template.prefix, suffix=template.suffix, packed=packed)
        masking = Masking.of(tokenizer, share=share, whole_words=whole_words)
        return MaskedRows(rows, masking, seed, draw, global_first)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def file(self) -> TokenFile:
        """Where the text is from."""
        return self.rows.file

    @property
    def length(self) -> int:
        """Slots of a row."""
        return self.rows.length

    def drawn(self, draw: int) -> MaskedRows:
        """The same rows with another mask."""
        return replace(self, draw=draw)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The given rows, with 0 in empty slots."""
        total = self.rows.length
        ids = np.zeros((len(indices), total), np.int64)
        targets = np.full((len(indices), total), IGNORE_INDEX, np.int64)
        lengths = []
        for b, i in enumerate(indices):
            row, parts = self.rows[i]
            ids[b, : len(row)], targets[b, : len(row)] = self.masking(row, keyed(self.seed, self.draw, i))
            lengths.append(parts)
        tokens = Tokens.packed(lengths, total=total)
        if self.global_first:
            tokens = tokens.with_global(tokens.index == 0)
        return torch.from_numpy(ids), torch.from_numpy(targets), tokens
