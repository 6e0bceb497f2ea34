"""Tokens hidden for a model to find again: the masked language model's example (Devlin et al. 2019)."""

# Legend: n tokens of a row, V size of the vocabulary.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.data.whole_word_masking import WordTable
from headway.errors import ConfigError
from headway.nn import IGNORE_INDEX
from headway.text import Tokenizer

SHARE, MASKED, RANDOM = 0.15, 0.8, 0.1


@dataclass(frozen=True, eq=False)
class Masking:
    """Which tokens are to be found, and what stands in their place (Devlin et al. 2019, section 3.1 and A.1).

        chosen      each token by itself with probability `share`; with `words`, each word by itself, as a whole
        of these    80 % become the mask, 10 % an ordinary token drawn uniformly, 10 % stay as they are

    Special tokens (those of the template, the unknown token) are never chosen. Every draw is a function of
    (row's key, slot), so it does not matter which rows are beside a row, nor in what order rows are masked.

    Attributes:
        mask: id of the mask token.
        special: bool [V]; ids that are never chosen.
        ordinary: int64 [*]; ids that a random token is drawn from.
        share: probability of a token (of a word, with `words`) to be chosen.
        words: where words begin; None where tokens are chosen one by one.
    """

    mask: int
    special: NDArray[np.bool_]
    ordinary: NDArray[np.int64]
    share: float = SHARE
    words: WordTable | None = None

    @staticmethod
    def of(tokenizer: Tokenizer, *, share: float = SHARE, whole_words: bool = False) -> Masking:
        """For a tokenizer. Raises DataError when it has no mask token, ConfigError for a share that is not in (0, 1),
        and where whole words are wanted from a tokenizer that does not tell them."""
        if not 0.0 < share < 1.0:
            raise ConfigError(f"masking: the share of tokens to be found lies between 0 and 1, got {share}")
        mask = tokenizer.need("mask")
        special = np.zeros(tokenizer.vocab_size, np.bool_)
        template = (*tokenizer.template.prefix, *tokenizer.template.suffix)
        special[[*tokenizer.special_ids, *template]] = True
        nothing = np.zeros_like(special)
        nothing[tokenizer.unused_ids(tokenizer.vocab_size)] = True
        ordinary = np.flatnonzero(~(special | nothing)).astype(np.int64)
        words = WordTable.of(tokenizer, special) if whole_words else None
        return Masking(mask, special, ordinary, share, words)

    def __call__(self, ids: NDArray[np.int64], key: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """ids [n] -> what the model reads [n], and what it is to find [n]: the id where chosen, else -100."""
        raw = np.random.Philox(key=key).random_raw(3 * len(ids)).reshape(3, -1)
        first, second, third = (raw >> np.uint64(11)) * 2.0**-53  # uniform in [0, 1)
        if self.words is not None:
            first = first[self.words.first_of(ids)]
        chosen = (first < self.share) & ~self.special[ids]
        other = self.ordinary[(third * len(self.ordinary)).astype(np.int64)]
        instead = np.where(second < MASKED, self.mask, np.where(second < MASKED + RANDOM, other, ids))
        return np.where(chosen, instead, ids), np.where(chosen, ids, IGNORE_INDEX)
