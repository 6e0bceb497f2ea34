"""Questions in words, in English and Chinese: topics found by the terms that a question shares with those of an index,
weighted by how rare these are.

The index is data, `en.toml` and `zh.toml`: by topic an answer, the command that shows it, and how it is asked. Nothing
is learned, and every score can be taken apart (`Match.terms`).

Terms of a text are words without their endings, cut to five letters ("padded", "padding" -> "pad"), and of Chinese
every two neighbours and every character; the index lists what is left out, since it says nothing of a topic ("why",
"怎么"). With N entries, of which n_t have the term t:

    idf(t) = log((N + 1) / (n_t + 1/2)), half of it for a single character
    w(T) = sum of idf^2 over a set of terms T
    cosine(Q, P) = w(Q & P) / sqrt(w(Q) w(P))  of a question and one of the index
    share(Q, E) = w(Q & E) / w(Q)              what the entry's questions and words together explain of it
    score = (largest cosine among the entry's questions + share) / 2,   0 .. 1

A question without a word of the subject, of which the index has a list, is declined unless the score is high; and
numbers and single characters that are no word of the subject are no reason to answer: an entry that shares nothing else
with a question does not answer it.
(Salton and Buckley 1988, "Term-weighting approaches in automatic text retrieval", with binary term frequencies.)
"""

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from headway.language import check_language

LEAST, SURE = 0.1, 0.6
"""A score below the first answers nothing; without a word of the subject, below the second."""
STEM = 5
CHINESE = re.compile(r"[\u3400-\u9fff]+")
WORD = re.compile(r"[a-z0-9√]+")
ENDING = re.compile(r"(?<=[a-z]{3})(?:ings?|ed|es|s|e|ly)$")
DOUBLED = re.compile(r"([b-df-hj-np-tv-z])\1$")


@dataclass(frozen=True)
class Entry:
    """What answers a kind of question: a topic, its answer, the command that shows it, how it is asked, other words
    that people have for it, and the verdict of the topic's last run that is kept, with its numbers."""

    topic: str
    answer: str
    command: str
    ask: Sequence[str]
    words: str
    verdict: str = ""


@dataclass(frozen=True)
class Match:
    """An entry found for a question, with its score and the terms that they share, the weightiest first."""

    entry: Entry
    score: float
    terms: tuple[str, ...]


def language_of(text: str) -> str:
    """ "zh" for a text with Chinese characters, else "en"."""
    return "zh" if CHINESE.search(text) else "en"


@cache
def _read(language: str) -> dict[str, Any]:
    return _table(check_language(language, "questions"))


def _table(name: str) -> dict[str, Any]:
    text = files("headway_lab.questions").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def entries(language: str) -> tuple[Entry, ...]:
    """The index of one language, in which an entry without a command has that of its topic. Raises ConfigError for
    another language."""
    verdicts = _table("verdicts")

    def verdict(topic: str) -> str:
        return f"{verdicts[topic][language]} ({verdicts[topic]['made']})" if topic in verdicts else ""

    return tuple(
        Entry(**{"topic": topic, "command": f"headway explain {topic}", "verdict": verdict(topic), **fields})
        for topic, fields in _read(language).items()
        if topic not in ("stop", "subject")
    )


@cache
def _stop_words() -> frozenset[str]:
    return frozenset(_read("en")["stop"].split())


@cache
def _stop_phrases() -> re.Pattern[str]:
    phrases = sorted(_read("zh")["stop"].split(), key=len, reverse=True)
    return re.compile("|".join(phrases))


def stem(word: str) -> str:
    """A word without its ending, cut to `STEM` letters: "scaling", "scale" -> "scal"."""
    return DOUBLED.sub(r"\1", ENDING.sub("", word))[:STEM]


def terms(text: str) -> frozenset[str]:
    """The terms of a text, as the module says."""
    lower = text.lower()
    words = {stem(word) for word in WORD.findall(lower) if word not in _stop_words()}
    runs = CHINESE.findall(_stop_phrases().sub(" ", lower))
    pairs = {run[i : i + 2] for run in runs for i in range(len(run) - 1)}
    return frozenset(words | pairs | {character for run in runs for character in run})


@cache
def _subject(language: str) -> frozenset[str]:
    words = _read(language)["subject"].split()
    return (
        frozenset(words)
        if language == "zh"
        else frozenset(stem(part) for w in words for part in WORD.findall(w))
    )


def _tells(term: str) -> bool:
    """Whether a term says what a question is about: numbers do not, nor do single characters but q, k, v."""
    return not term.isdigit() and (len(term) > 1 or term in _subject("en"))


class Index:
    """Entries by their terms."""

    def __init__(self, found: Sequence[Entry]) -> None:
        self.entries = tuple(found)
        self._asked = [[terms(question) for question in entry.ask] for entry in found]
        self._all = [
            frozenset.union(terms(f"{entry.topic} {entry.words}"), *asked)
            for entry, asked in zip(found, self._asked, strict=True)
        ]
        self._counts = Counter(term for own in self._all for term in own)

    def idf(self, term: str) -> float:
        """As the module says: largest for a term that no entry has."""
        single = len(term) == 1 and CHINESE.match(term) is not None
        return math.log((len(self.entries) + 1) / (self._counts[term] + 0.5)) / (1 + single)

    def find(self, question: str, most: int = 3) -> tuple[Match, ...]:
        """The best entries for a question, at most so many, best first. () where none reaches `LEAST` (`SURE`, in a
        question without a word of the subject)."""
        asked = terms(question)
        if not asked:
            return ()
        least = LEAST if self._is_of_the_subject(question, asked) else SURE
        telling = {term for term in asked if _tells(term)}
        ranked = sorted(
            (self._match(i, asked) for i in range(len(self.entries))), key=lambda match: -match.score
        )
        return tuple(
            match for match in ranked[:most] if match.score >= least and not telling.isdisjoint(match.terms)
        )

    @staticmethod
    def _is_of_the_subject(question: str, asked: frozenset[str]) -> bool:
        return not asked.isdisjoint(_subject("en")) or any(word in question for word in _subject("zh"))

    def _match(self, at: int, asked: frozenset[str]) -> Match:
        whole = self._weight(asked)
        near = max(
            self._weight(asked & known) / math.sqrt(whole * self._weight(known)) for known in self._asked[at]
        )
        shared = asked & self._all[at]
        score = (near + self._weight(shared) / whole) / 2
        return Match(self.entries[at], score, tuple(sorted(shared, key=lambda term: (-self.idf(term), term))))

    def _weight(self, some: Iterable[str]) -> float:
        return sum(self.idf(term) ** 2 for term in some)
