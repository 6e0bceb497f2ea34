"""Masking of tokens for masked language modelling (Devlin et al. 2019)."""

# Legend: n tokens of a row, V size of the vocabulary.

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.nn import IGNORE_INDEX
from headway.text import Tokenizer

SHARE, MASKED, RANDOM = 0.15, 0.8, 0.1
CONTINUED = "##"
# Scripts that are written without spaces: a run of their characters is not one word.
UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"
)


Begins = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Function of ids [n] that returns, for each token, the slot [n] at which its word begins."""


def word_begins(tokenizer: Tokenizer, ordinary: NDArray[np.int64]) -> Begins:
    """Returns the function that finds where words begin, for a tokenizer. A token of the ids `ordinary` continues the
    word before it if

        WordPiece         it is written ##..
        other tokenizers  it begins inside a character, or it begins with a letter or digit and the token before it
                          ends with one; in scripts without spaces (Chinese, Japanese, Thai) every token is a word of
                          its own, as with RoFormer's and WoBERT's tokenizers

    Raises ConfigError for a tokenizer whose tokens show neither bytes nor the continuation of words."""
    size = tokenizer.vocab_size
    # for each id: whether it always continues a word, begins with a letter or digit, ends with one
    inside, begins, ends = (np.zeros(size, np.bool_) for _ in range(3))
    if tokenizer.table is not None:
        for i in ordinary.tolist():
            raw = tokenizer.text_bytes(i, special=False) or b""
            text = raw.decode("utf-8", "ignore")
            inside[i] = raw[:1] >= b"\x80" and raw[:1] < b"\xc0"  # 0b10xxxxxx continues a UTF-8 character
            begins[i], ends[i] = _letter(text[:1]), _letter(text[-1:])
    else:
        inside[ordinary] = [tokenizer.token(i).startswith(CONTINUED) for i in ordinary.tolist()]
        if not inside.any():
            raise ConfigError(
                f"whole_words needs a tokenizer whose tokens show where words begin, but none of these {size} tokens "
                f"begins with {CONTINUED}; set whole_words=no"
            )

    def first_of(ids: NDArray[np.int64]) -> NDArray[np.int64]:
        goes_on = inside[ids]
        goes_on[1:] |= begins[ids[1:]] & ends[ids[:-1]]
        goes_on[:1] = False
        # words of 1, 3 and 1 tokens: goes_on 0 0 1 1 0, where() 0 1 0 0 4, running maximum 0 1 1 1 4
        return np.maximum.accumulate(np.where(goes_on, 0, np.arange(len(ids))))

    return first_of


@dataclass(frozen=True, eq=False)
class Masking:
    """Chooses the tokens to predict and replaces them in the input (Devlin et al. 2019, section 3.1 and A.1).

        chosen      each token independently with probability `share`; with `words`, each word as a whole
        of these    80 % become the mask token, 10 % an ordinary token drawn uniformly, 10 % are unchanged

    Special tokens (those of the template, the unknown token) are never chosen. Every draw is a function of (the row's
    key, slot), so that it depends neither on the other rows of the batch nor on the order in which rows are masked.

    Attributes:
        mask: id of the mask token.
        special: bool [V]; ids that are never chosen.
        ordinary: int64 [*]; ids from which random tokens are drawn.
        share: probability that a token (with `words`, a word) is chosen.
        words: function that finds where words begin (`word_begins`); None to choose single tokens.
    """

    mask: int
    special: NDArray[np.bool_]
    ordinary: NDArray[np.int64]
    share: float = SHARE
    words: Begins | None = None

    @staticmethod
    def of(tokenizer: Tokenizer, *, share: float = SHARE, whole_words: bool = False) -> "Masking":
        """Returns the masking for a tokenizer. Raises DataError if it has no mask token, ConfigError for a share
        outside (0, 1), and as `word_begins` if `whole_words`."""
        if not 0.0 < share < 1.0:
            raise ConfigError(f"masking: share must be above 0 and below 1, got {share}")
        mask = tokenizer.need("mask")
        special = np.zeros(tokenizer.vocab_size, np.bool_)
        template = (*tokenizer.template.prefix, *tokenizer.template.suffix)
        special[[*tokenizer.special_ids, *template]] = True
        ordinary = np.setdiff1d(np.flatnonzero(~special), tokenizer.unused_ids(tokenizer.vocab_size))
        words = word_begins(tokenizer, ordinary) if whole_words else None
        return Masking(mask, special, ordinary, share, words)

    def __call__(self, ids: NDArray[np.int64], key: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Masks ids [n]; returns the model's inputs [n] and targets [n]: the original id if chosen, else -100."""
        raw = np.random.Philox(key=key).random_raw(3 * len(ids)).reshape(3, -1)
        first, second, third = (raw >> np.uint64(11)) * 2.0**-53  # uniform in [0, 1)
        if self.words is not None:
            first = first[self.words(ids)]
        chosen = (first < self.share) & ~self.special[ids]
        random_ids = self.ordinary[(third * len(self.ordinary)).astype(np.int64)]
        replaced = np.where(second < MASKED, self.mask, np.where(second < MASKED + RANDOM, random_ids, ids))
        return np.where(chosen, replaced, ids), np.where(chosen, ids, IGNORE_INDEX)


def _letter(character: str) -> bool:
    return character.isalnum() and not UNSPACED.match(character)
