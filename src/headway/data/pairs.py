"""Sentences and their translations: read, encoded, and put into batches by length.

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

START, END = 0, 1  # ids of `train_bpe`: a target begins with START; END ends either side


@dataclass(frozen=True)
class Pairs:
    """Ids of sentences and of their translations; END ends each."""

    sources: Sequence[Sequence[int]]
    targets: Sequence[Sequence[int]]

    def described(self) -> dict[str, Any]:
        """A description that tells these pairs from others, ids and order included."""
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
        """The pairs `rows`, padded on the right; a target is read one slot late, behind START.

        Inputs are source [B, S], ids [B, T], their descriptions source_tokens and tokens, and `options`."""
        sources, targets = [self.sources[i] for i in rows], [self.targets[i] for i in rows]
        inputs = {
            "source": padded(sources, END),
            "source_tokens": Tokens.from_lengths([len(ids) for ids in sources]),
            "ids": padded([[START, *ids[:-1]] for ids in targets], END),
            "tokens": Tokens.from_lengths([len(ids) for ids in targets]),
        }
        return Batch(inputs | options, padded(targets, IGNORE_INDEX))


def batches(pairs: Pairs, batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Every pair once, beside pairs of its length; at most `batch_tokens` slots on either side, padding included.

    A pure function of its arguments: the pairs in an order of their own (`Permutation`), sorted by length,
    cut, and the batches in an order of their own again. The lengths alone say how many there are, so that every epoch
    has as many.
    """
    drawn = Permutation(seed, epoch, len(pairs.sources))
    rows = sorted(map(drawn, range(drawn.size)), key=lambda i: (len(pairs.targets[i]), len(pairs.sources[i])))
    lengths = [max(map(len, both)) for both in zip(pairs.sources, pairs.targets, strict=True)]
    groups = in_slots(rows, lengths, batch_tokens)
    order = Permutation(seed + 1, epoch, len(groups))
    return [groups[order(i)] for i in range(len(groups))]


def joint_tokenizer(texts: Iterator[str], vocab: int) -> Tokenizer:
    """A byte-level BPE of both languages: END ends a sentence, nothing begins it; padding is START, as in Marian."""
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
    """The lines of a UTF-8 file, .gz or not. Raises DataError for one that is empty or cannot be read."""
    sentences = []
    for where, line in lines(existing(local(path))):
        sentences.append(line.strip())
        if not sentences[-1]:
            raise DataError(f"{where}: the line is empty; a sentence stands on each")
    return sentences


def read_pairs(source: str, target: str) -> tuple[list[str], list[str]]:
    """The lines of both files. Raises DataError when they are not as many."""
    left, right = read_lines(source), read_lines(target)
    if len(left) != len(right):
        raise DataError(
            f"{source} has {len(left)} lines and {target} {len(right)}: line i of one is to be the translation of "
            "line i of the other"
        )
    return left, right


def encode_pairs(tokenizer: Tokenizer, sources: Sequence[str], targets: Sequence[str], context: int) -> Pairs:
    """The ids of both sides, each in its language where the tokenizer has several. Raises DataError for a pair with
    more than `context` tokens on one side, and for a language that the tokenizer's configuration does not say."""
    left = right = tokenizer
    if tokenizer.languages:
        source, target = check_pair(tokenizer.languages, tokenizer.config)
        left, right = tokenizer.between(source), tokenizer.between(target)
    pairs = Pairs(left.encode_batch(sources), right.encode_batch(targets))
    for i, both in enumerate(zip(pairs.sources, pairs.targets, strict=True)):
        longest = max(map(len, both))
        if longest > context:
            raise DataError(
                f"pair {i + 1} has {longest} tokens on one side, and context is {context}; raise it, or leave "
                "the pair out"
            )
    return pairs
