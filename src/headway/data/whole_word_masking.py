"""Which tokens belong to one word, told from the tokens alone."""

# Legend: n tokens of a row, V size of the vocabulary.

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.text import Tokenizer

CONTINUED = "##"
# Scripts that are written without spaces: a run of their characters is not one word.
UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"
)


@dataclass(frozen=True, eq=False)
class WordTable:
    """A token goes on with the word before it when

        WordPiece         it is written ##..
        other tokenizers  it begins in the midst of a character, or it begins with a letter or digit and the token
                          before it ends with one; where a script has no spaces (Chinese, Japanese, Thai) every
                          token is a word of its own, as with RoFormer's and WoBERT's tokenizers

    `inside` `begins` `ends`: bool [V], whether a token always goes on, begins, ends with a letter.
    """

    inside: NDArray[np.bool_]
    begins: NDArray[np.bool_]
    ends: NDArray[np.bool_]

    @staticmethod
    def of(tokenizer: Tokenizer, special: NDArray[np.bool_]) -> WordTable:
        """Raises ConfigError for a tokenizer whose tokens tell neither words nor bytes."""
        size = tokenizer.vocab_size
        inside, begins, ends = (np.zeros(size, np.bool_) for _ in range(3))
        ids = [i for i in np.flatnonzero(~special).tolist() if i not in set(tokenizer.unused_ids(size))]
        if tokenizer.table is not None:
            for i in ids:
                found = tokenizer.text_bytes(i, special=False) or b""
                text = found.decode("utf-8", "ignore")
                inside[i] = found[:1] >= b"\x80" and found[:1] < b"\xc0"
                begins[i], ends[i] = _letter(text[:1]), _letter(text[-1:])
        else:
            for i in ids:
                inside[i] = tokenizer.token(i).startswith(CONTINUED)
            if not inside.any():
                raise ConfigError(
                    f"whole words are to be masked, but no token of this tokenizer ({size} tokens) says that it goes "
                    f"on with a word ({CONTINUED}..); mask tokens one by one (whole_words=no)"
                )
        return WordTable(inside, begins, ends)

    def first_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """ids [n] -> for each token, the slot [n] where its word begins."""
        goes_on = self.inside[ids]
        goes_on[1:] |= self.begins[ids[1:]] & self.ends[ids[:-1]]
        goes_on[:1] = False
        return np.maximum.accumulate(np.where(goes_on, 0, np.arange(len(ids))))


def _letter(character: str) -> bool:
    return character.isalnum() and not UNSPACED.match(character)
