"""Requests for instructions until there are enough: a pure function of the settings and the replies. Near duplicates of
other instructions are detected by ROUGE-L (Lin 2004):

rouge_l(x, y) = 2 L / (|x| + |y|), where L is the length of their longest common subsequence of words: the F-measure of
recall L / |x| and precision L / |y|, as in rouge_score (Alpaca uses its "rougeL", without stemmer).
"""

import itertools
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from headway.endpoints import Endpoint, Reply, Transcript, in_order
from headway.errors import DataError
from headway.instruct.items import Item, Rejected, parse, prompt
from headway.storage.files import atomic_write

_WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """Returns the runs of letters and digits of a text, in lower case. On ASCII text these are rouge_score's tokens;
    rouge_score drops all other letters."""
    return _WORD.findall(text.lower())


def lcs_length(a: Sequence[str], b: Sequence[str]) -> int:
    """Returns the length of the longest common subsequence, bit-parallel with one bit per word of `a` (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for i, word in enumerate(a):
        places[word] = places.get(word, 0) | 1 << i
    full = (1 << len(a)) - 1
    row = full  # bit i is 0 if the current row of the dynamic program's table increases by one at column i
    for word in b:
        # a = x y, b = y: row 11, hits 10, (101 | 001) & 11 = 01: one bit is 0, so the length is 1
        hits = row & places.get(word, 0)
        row = ((row + hits) | (row - hits)) & full
    return len(a) - row.bit_count()


def rouge_l(a: Sequence[str], b: Sequence[str]) -> float:
    """Returns ROUGE-L of two lists of words, 0..1; 0 if one of them is empty."""
    return 2 * lcs_length(a, b) / (len(a) + len(b)) if a and b else 0.0


class Neighbours:
    """A set of texts, searched for near duplicates of another text by ROUGE-L.

    A common subsequence has at most as many words as the two texts share. So ROUGE-L is computed only if the number of
    shared words allows it to be greater than `limit`, and texts without shared words are never visited.

    compared: number of pairs for which ROUGE-L was computed.
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
        """Returns the index of the text with the greatest ROUGE-L with this one (the first of equals), and that value;
        None if no text has more than `limit`."""
        shared: Counter[int] = Counter()
        for word, count in Counter(text).items():
            for other, times in self._with.get(word, ()):
                shared[other] += min(count, times)
        best, index = self.limit, None
        for other in sorted(shared):
            if 2 * shared[other] > best * (len(text) + len(self.texts[other])):
                self.compared += 1
                rouge = rouge_l(text, self.texts[other])
                if rouge > best:
                    best, index = rouge, other
        return None if index is None else (index, best)


EXAMPLES = 3
NEAR = 0.7
PATIENCE = 20  # replies in a row without a new instruction, after which the run fails


@dataclass(frozen=True)
class Made:
    """The result of a run.

    items: the instructions that were kept.
    replies, sent: number of replies used, and how many of them were requested rather than replayed.
    rejected: number of rejected items, by reason.
    out, rejects, transcript: files of the instructions, of the rejected items, and of all replies.
    """

    items: list[Item] = field(repr=False)
    replies: int
    sent: int
    rejected: dict[str, int]
    out: Path
    rejects: Path
    transcript: Path

    @property
    def asked(self) -> int:
        """Number of items in the replies: kept and rejected."""
        return len(self.items) + sum(self.rejected.values())


def make_instructions(
    endpoint: Endpoint,
    seeds: Sequence[Item],
    count: int,
    out: str | Path,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    max_tokens: int = 3072,
    parallel: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> Made:
    """Generates `count` instructions and writes them to `out`, a JSONL file of Alpaca's records.

    Each request shows 3 of the seeds, drawn by (seed, number of the request), and asks for the rest of a list of 20. An
    item of the reply is kept unless a filter rejects it, or its ROUGE-L with a seed or a kept item is greater than 0.7
    (`headway.instruct.make`). Rejected items are written to `out`.rejects.jsonl, with reasons, and all replies to
    `out`.transcript.jsonl: a run that is started again replays them and continues as if it had never been interrupted,
    and a run with a greater `count` continues a smaller one. `parallel` requests are sent at a time, which does not
    change the result.

    Raises DataError for fewer than 3 seeds, and after 20 replies in a row without a new instruction; and what the
    endpoint raises. What was generated until then is written.
    """
    if len(seeds) < EXAMPLES:
        raise DataError(
            f"{len(seeds)} seed tasks are too few: a request shows {EXAMPLES}; give that many or more"
        )
    path = Path(out)
    rejects, transcript = (path.with_name(f"{path.name}.{kind}.jsonl") for kind in ("rejects", "transcript"))
    pool = Neighbours(NEAR)
    for item in seeds:
        pool.add(words(item.instruction))
    texts = [item.instruction for item in seeds]
    kept: list[Item] = []
    refused: list[tuple[int, Rejected]] = []
    number = without_new = 0
    with Transcript(transcript) as replies:

        def ask(i: int) -> Reply:
            shown = random.Random(f"{seed}:{i}").sample(seeds, EXAMPLES)
            messages = [{"role": "user", "content": prompt(shown)}]
            settings = {"seed": seed * 1_000_000 + i, "temperature": temperature, "max_tokens": max_tokens}
            return replies.chat(endpoint, f"{seed}:{i}", messages, **settings)  # type: ignore[arg-type]

        chunks = (range(first, first + parallel) for first in itertools.count(0, parallel))
        rounds = (reply for chunk in chunks for reply in in_order(ask, chunk, parallel))
        try:
            while len(kept) < count:
                reply, kept_before = next(rounds), len(kept)
                for parsed in parse(reply, EXAMPLES + 1):
                    if len(kept) == count:
                        break
                    tokens = [] if isinstance(parsed, Rejected) else words(parsed.instruction)
                    duplicate = pool.nearest(tokens)
                    if isinstance(parsed, Rejected):
                        refused.append((number, parsed))
                    elif duplicate is not None:
                        detail = f"ROUGE-L {duplicate[1]:.3f} with: {texts[duplicate[0]]}"
                        refused.append((number, Rejected("near-duplicate", parsed.instruction, detail)))
                    else:
                        kept.append(parsed)
                        texts.append(parsed.instruction)
                        pool.add(tokens)
                number, without_new = number + 1, 0 if len(kept) > kept_before else without_new + 1
                say(f"reply {number}: {len(kept) - kept_before} kept, {len(kept)} of {count}")
                if without_new == PATIENCE:
                    counts = ", ".join(f"{why} {n}" for why, n in _reasons(refused).items())
                    raise DataError(
                        f"{PATIENCE} replies in a row brought no new instruction (rejected so far: {counts}); look at "
                        f"{rejects}, or use a model that can write such a list"
                    )
        finally:
            if number:
                atomic_write(path, "".join(_line(asdict(item)) for item in kept))
                atomic_write(rejects, "".join(_line({"reply": n, **asdict(item)}) for n, item in refused))
        return Made(kept, number, replies.sent, _reasons(refused), path, rejects, transcript)


def _reasons(refused: Sequence[tuple[int, Rejected]]) -> dict[str, int]:
    return dict(Counter(rejected.reason for _, rejected in refused).most_common())


def _line(value: dict[str, object]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
