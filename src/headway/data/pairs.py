"""Sentences and their translations: reading, encoding, and batching by length.

Legend: B pairs of a batch, S source slots, T target slots.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from headway.data.hub import local
from headway.data.order import Permutation
from headway.data.rows import Batch, in_slots, padded
from headway.data.values import existing, lines
from headway.errors import DataError
from headway.nn import IGNORE_INDEX
from headway.text import Tokenizer, train_bpe
from headway.text.languages import check_pair
from headway.tokens import Tokens

START, END = 0, 1  # ids of `train_bpe`: decoder inputs begin with START; sources and targets end with END


@dataclass(frozen=True)
class Pairs:
    """Token ids of sentences and of their translations; each ends with END."""

    sources: Sequence[Sequence[int]]
    targets: Sequence[Sequence[int]]

    def described(self) -> dict[str, Any]:
        """Returns counts and a digest that identify these pairs, ids and order included."""
        digest = hashlib.blake2b(digest_size=8)
        for ids in chain(self.sources, self.targets):
            digest.update(array("q", [len(ids), *ids]).tobytes())
        return {
            "pairs": len(self.sources),
            "source_tokens": sum(map(len, self.sources)),
            "target_tokens": sum(map(len, self.targets)),
            "digest": digest.hexdigest(),
        }

    def batch(self, rows: Sequence[int], **options: Any) -> Batch:
        """Returns the pairs `rows` as a batch, padded on the right; the decoder reads the target shifted right by one,
        after START.

        Inputs are source [B, S], ids [B, T], the `Tokens` of both (source_tokens and tokens), and `options`."""
        sources, targets = [self.sources[i] for i in rows], [self.targets[i] for i in rows]
        inputs = {
            "source": padded(sources, END),
            "source_tokens": Tokens.from_lengths([len(ids) for ids in sources]),
            "ids": padded([[START, *ids[:-1]] for ids in targets], END),
            "tokens": Tokens.from_lengths([len(ids) for ids in targets]),
        }
        return Batch(inputs | options, padded(targets, IGNORE_INDEX))


def batches(pairs: Pairs, batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Returns the batches of an epoch: each pair once, among pairs of similar length, with at most `batch_tokens` slots
    on either side, padding included.

    A pure function of its arguments: the pairs are shuffled (`Permutation`), sorted by length and cut into batches,
    whose order is shuffled again. The number of batches depends on the lengths only, so that all epochs have the same.
    """
    drawn = Permutation(seed, epoch, len(pairs.sources))
    rows = sorted(map(drawn, range(drawn.size)), key=lambda i: (len(pairs.targets[i]), len(pairs.sources[i])))
    lengths = [max(map(len, pair)) for pair in zip(pairs.sources, pairs.targets, strict=True)]
    groups = in_slots(rows, lengths, batch_tokens)
    order = Permutation(seed + 1, epoch, len(groups))
    return [groups[order(i)] for i in range(len(groups))]


def joint_tokenizer(texts: Iterator[str], vocab: int) -> Tokenizer:
    """Trains a byte-level BPE for both languages: sentences end with END and begin with no token; padding is START, as
    in Marian."""
    trained = train_bpe(texts, vocab)
    return Tokenizer(
        trained.backend,
        bos=START,
        eos=END,
        begins_with_bos=False,
        ends_with_eos=True,
        special={"pad": START},
        config=trained.config,
    )


def read_lines(path: str | Path) -> list[str]:
    """Returns the lines of a UTF-8 file (or .gz of one), stripped. Raises DataError for an empty line, and for a file
    that is empty or cannot be read."""
    sentences = []
    for where, line in lines(existing(local(path))):
        sentences.append(line.strip())
        if not sentences[-1]:
            raise DataError(f"{where}: the line is empty; each line must hold a sentence")
    return sentences


def read_pairs(source: str, target: str) -> tuple[list[str], list[str]]:
    """Returns the lines of both files. Raises DataError if their numbers differ."""
    left, right = read_lines(source), read_lines(target)
    if len(left) != len(right):
        raise DataError(
            f"{source} has {len(left)} lines, but {target} has {len(right)}; line i of one must be the translation of "
            "line i of the other"
        )
    return left, right


def encode_pairs(tokenizer: Tokenizer, sources: Sequence[str], targets: Sequence[str], context: int) -> Pairs:
    """Encodes both sides, each in its language if the tokenizer has several. Raises DataError for a pair with more than
    `context` tokens on one side, and if the tokenizer's configuration does not name the languages."""
    left = right = tokenizer
    if tokenizer.languages:
        source, target = check_pair(tokenizer.languages, tokenizer.config)
        left, right = tokenizer.between(source), tokenizer.between(target)
    pairs = Pairs(left.encode_batch(sources), right.encode_batch(targets))
    for i, pair in enumerate(zip(pairs.sources, pairs.targets, strict=True)):
        longest = max(map(len, pair))
        if longest > context:
            raise DataError(
                f"pair {i + 1} has {longest} tokens on one side, more than context {context}; raise context, or "
                "remove the pair"
            )
    return pairs
