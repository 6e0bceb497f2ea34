"""Questions in words, in English and Chinese: topics found by the terms that a question shares with those of an index,
weighted by how rare these are.

The index is data, `en.toml` and `zh.toml`: lists of words, and by topic an answer, the command that shows it, how it is
asked, and what the documents' pages say of it; `asked.toml` has more of what people asked. Nothing is learned, and
every score can be taken apart (`Match.terms`).

Terms of a text are words without their endings, cut to six letters ("padded", "padding" -> "pad"), and of Chinese
every character and every two neighbours, within words of the index and within what stands between them. Other names of
a thing are replaced first (`same`: "BN", "批归一化"), what says nothing of a topic is left out (`stop`: "why", "怎么").
With N entries, of which n_t have the term t:

    idf(t) = log((N + 1) / (n_t + 1/2)), half of it for a single character, 0.7 of it for a term that entries have and
             that is of no word of the field
    w(T) = sum of idf over a set of terms T
    cosine(Q, P) = w(Q & P) / sqrt(w(Q) w(P))  of a question and a sentence of the index, asked or said
    share(Q, E) = sum over Q & E of idf f / (f + K), over w(Q)
                                               what all that the entry has explains of it, a term the more of its
                                               sentences have it: f of them, the words of the entry counted as one
    score = (largest cosine among the entry's sentences + share) / 2,   0 .. 1

Words of the field are those that few people have for anything else (`subject`: "softmax", "归一化") and those that
all have (`everyday`: "head", "窗口"). The more of them a question has, the less is the score that it needs: with p
points, 3 for each of the former and 1 for each of the latter, SURE - DROP (p - 1), no less than LEAST, no more than
SURE. It needs STRANGE if it has a name that no entry has ("Medusa", a Latin word in a Chinese question), or shares one
term with an entry while others are of no entry. One that names what lies beside the subject (`beside`: "reward",
"蒸馏", "price", "医生") is not answered. Numbers and single characters that are no word of the subject are no reason to
answer: an entry that shares nothing else with a question does not answer it.
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
    """The answer to a kind of question: a topic, its answer, the command that shows it, how it is asked, other words
    that people have for it, what the documents' pages say of it, and the verdict of the topic's last run that is kept,
    with its numbers."""

    topic: str
    answer: str
    command: str
    ask: Sequence[str]
    words: str
    says: Sequence[str] = ()
    verdict: str = ""


@dataclass(frozen=True)
class Match:
    """An entry found for a question, with its score and the terms that they share, the weightiest first."""

    entry: Entry
    score: float
    terms: tuple[str, ...]


@cache
def entries(language: str) -> tuple[Entry, ...]:
    """The index of one language, in which an entry without a command has that of its topic. Raises ConfigError for
    another language."""
    fields_of = read(language)
    verdicts, asked = table("verdicts"), table("asked")[language]

    def verdict(topic: str) -> str:
        return f"{verdicts[topic][language]} ({verdicts[topic]['made']})" if topic in verdicts else ""

    def entry(topic: str, fields: dict[str, Any]) -> Entry:
        usual = {"topic": topic, "command": f"headway explain {topic}", "verdict": verdict(topic)}
        return Entry(**{**usual, **fields, "ask": (*fields["ask"], *asked.get(topic, ()))})

    return tuple(entry(topic, fields) for topic, fields in fields_of.items() if topic not in LISTS)


class Index:
    """Entries by their terms."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = tuple(entries)
        sentences = [[terms(text) for text in (*entry.ask, *entry.says)] for entry in entries]
        self._has = [
            Counter(chain(terms(f"{entry.topic} {entry.words}"), *group))
            for entry, group in zip(entries, sentences, strict=True)
        ]
        self._counts = Counter(chain.from_iterable(self._has))
        self._idf: dict[str, float] = {}
        self._sentences = [[(group, self._weight(group)) for group in some] for some in sentences]

    def idf(self, term: str) -> float:
        """As the module says: largest for a term that no entry has."""
        if term not in self._idf:
            single = SINGLE if len(term) == 1 and CHINESE.match(term) else 1
            other = OTHER if self._counts[term] and term not in field() else 1
            self._idf[term] = single * other * math.log((len(self.entries) + 1) / (self._counts[term] + 0.5))
        return self._idf[term]

    def find(self, question: str, most: int = 3) -> tuple[Match, ...]:
        """The best entries for a question, at most so many, best first. () where none has the score that it needs."""
        query = terms(question)
        telling = {term for term in query if tells(term)}
        if not telling:
            return ()
        strange = {term for term in telling - field() if term not in self._counts}
        named = not strange.isdisjoint(term for name in names(question) for term in name)
        needed = max(least(question), STRANGE if named else 0)
        ranked = sorted(
            (self._match(i, query) for i in range(len(self.entries))), key=lambda match: -match.score
        )[:most]
        shares = [len(telling.intersection(match.terms)) for match in ranked]
        return tuple(
            match
            for match, shared in zip(ranked, shares, strict=True)
            if shared and match.score >= (max(needed, STRANGE) if strange and shared == 1 else needed)
        )

    def _match(self, at: int, query: frozenset[str]) -> Match:
        whole = self._weight(query)
        near = max(
            self._weight(query & sentence) / math.sqrt(whole * weight)
            for sentence, weight in self._sentences[at]
        )
        has = self._has[at]
        shared = query & has.keys()
        share = sum(self.idf(term) * has[term] / (has[term] + K) for term in shared) / whole
        score = (near + share) / 2
        return Match(self.entries[at], score, tuple(sorted(shared, key=lambda term: (-self.idf(term), term))))

    def _weight(self, some: Iterable[str]) -> float:
        return sum(self.idf(term) for term in some)
