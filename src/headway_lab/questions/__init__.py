"""Questions in words, in English and Chinese: finds topics by the terms that a question shares with those of an index,
weighted by how rare the terms are.

The index is data, `en.toml` and `zh.toml`: word lists, and for each topic an answer, the command that shows it, ways
of asking for it, and what the documents' pages say about it; `asked.toml` has more questions that people asked.
Nothing is learned, and every score can be decomposed (`Match.terms`).

The terms of a text are its words without their endings, cut to six letters ("padded", "padding" -> "pad"); for
Chinese, every character and every pair of neighbours, within the words of the index and within the text between
those words. Synonyms are replaced first (`same`: "BN", "批归一化"), and words that say nothing about a topic are
dropped (`stop`: "why", "怎么"). With N entries, n_t of which have the term t:

    idf(t) = log((N + 1) / (n_t + 1/2)), times 1/2 for a single Chinese character, times 0.7 for a term that entries
             have but that belongs to no word of the field
    w(T) = sum of idf over a set of terms T
    cosine(Q, P) = w(Q & P) / sqrt(w(Q) w(P))  of a question Q and a sentence P of the index, asked or said
    share(Q, E) = sum over Q & E of idf f / (f + K), over w(Q)
                                               how much of the question the whole entry explains: f is the number of
                                               its sentences that have the term; its words count as one sentence
    score = (largest cosine among the entry's sentences + share) / 2,   0 .. 1

Words of the field are those that few people use for anything else (`subject`: "softmax", "归一化") and those that
everybody uses (`everyday`: "head", "窗口"). The more of them a question has, the lower is the score that it needs:
with p points, 3 for each of the former and 1 for each of the latter, SURE - DROP (p - 1), at least LEAST, at most
SURE. It needs STRANGE if it has a name that no entry has ("Medusa", a Latin word in a Chinese question), or if it
shares only one term with an entry while other terms are in no entry. A question that names something outside the
subject (`beside`: "reward", "蒸馏", "price", "医生") is not answered. An entry that shares only numbers and single
characters that are no word of the subject with a question does not answer it.
(Salton and Buckley 1988, "Term-weighting approaches in automatic text retrieval", with binary term frequencies; the
share's f / (f + K) is from Robertson and Walker 1994, "Some simple effective approximations to the 2-Poisson model".)
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from headway_lab.questions.text import CHINESE, LISTS, STRANGE, field, least, names, read, table, tells, terms
from headway_lab.questions.text import language_of as language_of

SINGLE, OTHER, K = 0.5, 0.7, 0.5


@dataclass(frozen=True)
class Entry:
    """The answer to a kind of question: a topic, its answer, the command that shows it, ways of asking for it, other
    words that people use for it, what the documents' pages say about it, and the verdict of the topic's last recorded
    run, with its numbers."""

    topic: str
    answer: str
    command: str
    ask: Sequence[str]
    words: str
    says: Sequence[str] = ()
    verdict: str = ""


@dataclass(frozen=True)
class Match:
    """An entry found for a question, with its score and the terms that they share, the largest idf first."""

    entry: Entry
    score: float
    terms: tuple[str, ...]


@cache
def entries(language: str) -> tuple[Entry, ...]:
    """Returns the index of one language, in which an entry without a command has that of its topic. Raises ConfigError
    for an unknown language."""
    fields_of = read(language)
    verdicts, asked = table("verdicts"), table("asked")[language]

    def verdict(topic: str) -> str:
        return f"{verdicts[topic][language]} ({verdicts[topic]['made']})" if topic in verdicts else ""

    def entry(topic: str, fields: dict[str, Any]) -> Entry:
        defaults = {"topic": topic, "command": f"headway explain {topic}", "verdict": verdict(topic)}
        return Entry(**{**defaults, **fields, "ask": (*fields["ask"], *asked.get(topic, ()))})

    return tuple(entry(topic, fields) for topic, fields in fields_of.items() if topic not in LISTS)


class Index:
    """A searchable index of entries by their terms."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = tuple(entries)
        sentences = [[terms(text) for text in (*entry.ask, *entry.says)] for entry in entries]
        self._has = [
            Counter(chain(terms(f"{entry.topic} {entry.words}"), *group))
            for entry, group in zip(entries, sentences, strict=True)
        ]
        self._counts = Counter(chain.from_iterable(self._has))
        self._idf: dict[str, float] = {}
        self._sentences = [
            [(group, self._weight(group)) for group in entry_sentences] for entry_sentences in sentences
        ]

    def idf(self, term: str) -> float:
        """Returns the weight of a term as defined in the module's docstring: largest for a term that no entry has."""
        if term not in self._idf:
            single = SINGLE if len(term) == 1 and CHINESE.match(term) else 1
            factor = OTHER if self._counts[term] and term not in field() else 1
            self._idf[term] = single * factor * math.log((len(self.entries) + 1) / (self._counts[term] + 0.5))
        return self._idf[term]

    def find(self, question: str, most: int = 3) -> tuple[Match, ...]:
        """Returns at most `most` entries for a question, best first; () if none reaches the score that the question
        needs."""
        query = terms(question)
        informative = {term for term in query if tells(term)}
        if not informative:
            return ()
        unknown = {term for term in informative - field() if term not in self._counts}
        has_unknown_name = not unknown.isdisjoint(term for name in names(question) for term in name)
        needed = max(least(question), STRANGE if has_unknown_name else 0)
        ranked = sorted(
            (self._match(i, query) for i in range(len(self.entries))), key=lambda match: -match.score
        )[:most]
        shares = [len(informative.intersection(match.terms)) for match in ranked]
        return tuple(
            match
            for match, shared in zip(ranked, shares, strict=True)
            if shared and match.score >= (max(needed, STRANGE) if unknown and shared == 1 else needed)
        )

    def _match(self, at: int, query: frozenset[str]) -> Match:
        query_weight = self._weight(query)
        cosine = max(
            self._weight(query & sentence) / math.sqrt(query_weight * weight)
            for sentence, weight in self._sentences[at]
        )
        sentence_counts = self._has[at]
        shared = query & sentence_counts.keys()
        share = (
            sum(self.idf(term) * sentence_counts[term] / (sentence_counts[term] + K) for term in shared)
            / query_weight
        )
        score = (cosine + share) / 2
        return Match(self.entries[at], score, tuple(sorted(shared, key=lambda term: (-self.idf(term), term))))

    def _weight(self, some: Iterable[str]) -> float:
        return sum(self.idf(term) for term in some)
