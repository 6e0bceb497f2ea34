"""ROUGE-L (Lin 2004) between short texts, and the most similar of many.

rouge_l(x, y) = 2 L / (|x| + |y|), L the length of their longest common subsequence of words: the F-measure of recall
L / |x| and precision L / |y|, as in rouge_score (of which Alpaca takes "rougeL", without stemmer).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

_WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """Runs of letters and digits in lower case. For ASCII, rouge_score's tokens; that one drops all other letters."""
    return _WORD.findall(text.lower())


def lcs_length(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence, a bit for each of `a` at once (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for i, word in enumerate(a):
        places[word] = places.get(word, 0) | 1 << i
    full = (1 << len(a)) - 1
    row = full  # a bit is 0 where the table of the plain algorithm grows by one
    for word in b:
        hits = row & places.get(word, 0)
        row = ((row + hits) | (row - hits)) & full
    return len(a) - row.bit_count()


def rouge_l(a: Sequence[str], b: Sequence[str]) -> float:
    """ROUGE-L of two texts as words, 0..1; 0 where one of them has none."""
    return 2 * lcs_length(a, b) / (len(a) + len(b)) if a and b else 0.0


class Neighbours:
    """Texts, and which of them one more is a near-duplicate of.

    A common subsequence has no more words than the two texts share, so that ROUGE-L is computed only where the shared
    words alone could make it greater than `limit`; texts that share none are not even looked at.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.texts: list[list[str]] = []
        self.compared = 0
        self._with: dict[str, list[tuple[int, int]]] = defaultdict(list)  # word -> (text, how often)

    def add(self, text: Sequence[str]) -> None:
        for word, count in Counter(text).items():
            self._with[word].append((len(self.texts), count))
        self.texts.append(list(text))

    def nearest(self, text: Sequence[str]) -> tuple[int, float] | None:
        """The text whose ROUGE-L with this one is greatest, and that, if it is greater than `limit`; the first of
        equals."""
        shared: Counter[int] = Counter()
        for word, count in Counter(text).items():
            for other, times in self._with.get(word, ()):
                shared[other] += min(count, times)
        best, found = self.limit, None
        for other in sorted(shared):
            if 2 * shared[other] > best * (len(text) + len(self.texts[other])):
                self.compared += 1
                near = rouge_l(text, self.texts[other])
                if near > best:
                    best, found = near, other
        return None if found is None else (found, best)
