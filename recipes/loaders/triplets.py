"""Triplets of passages in the form of CAIL2019-SCM (Xiao et al. 2019): A, B, C, and which of the two is more like A.

    python recipes/loaders/triplets.py chapters.jsonl 700 [SEED] > triplets.jsonl

A stand-in where the published set is not at hand: A and B are stretches of 700 characters of one chapter, C is one of
another. The published file needs no loader.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence


def triplets(chapters: Sequence[str], length: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Two stretches of each chapter that has them, wherever they do not overlap, and one of another chapter."""
    rng = random.Random(seed)
    long = [text for text in chapters if len(text) >= 2 * length]
    for number, text in enumerate(long):
        cuts = [text[at : at + length] for at in range(0, len(text) - length + 1, length)]
        for first, second in zip(cuts[::2], cuts[1::2], strict=False):
            other = long[(number + rng.randrange(1, len(long))) % len(long)]
            at = rng.randrange(len(other) - length + 1)
            far, label = other[at : at + length], rng.choice("BC")
            near = {"B": second, "C": far} if label == "B" else {"B": far, "C": second}
            yield {"A": first, **near, "label": label}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    for record in triplets(texts, int(sys.argv[2]), int((sys.argv[3:] or ["0"])[0])):
        print(json.dumps(record, ensure_ascii=False))
