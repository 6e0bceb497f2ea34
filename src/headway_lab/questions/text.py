"""Terms of a text, and the lists of words of the index: which are of its subject, and which stand for others."""

import math
import re
import tomllib
import unicodedata
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from headway.language import LANGUAGES, check_language

LISTS = ("stop", "subject", "everyday", "beside", "same")
LEAST, SURE, DROP, STRANGE = 0.2, 0.42, 0.06, 0.5
STEM = 6
CHINESE = re.compile(r"[\u3400-\u9fff]+")
WORD = re.compile(r"[a-z0-9]+")
NAME = re.compile(r"(?<![a-z0-9_])[a-z0-9]+(?:_[a-z0-9]+)+")
CAPITAL = re.compile(r"(?<=[a-z,:;)] )[A-Z]\w{2,}")
ENDING = re.compile(r"(?<=[a-z]{3})(?:ings?|ed|es|(?<!s)s|e|ly)$")
DOUBLED = re.compile(r"([b-df-hj-np-rtv-z])\1$")


def language_of(text: str) -> str:
    """ "zh" for a text with Chinese characters, else "en"."""
    return "zh" if CHINESE.search(text) else "en"


@cache
def read(language: str) -> dict[str, Any]:
    """The lists and the entries of one language. Raises ConfigError for another."""
    return table(check_language(language, "questions"))


def table(name: str) -> dict[str, Any]:
    """A table of this folder."""
    text = files("headway_lab.questions").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def _words(language: str, *lists: str) -> frozenset[str]:
    return frozenset(word for name in lists for word in read(language)[name].split())


@cache
def _names(language: str) -> dict[str, str]:
    """The name that the index has for a thing, by each other name of it."""
    lines = [line.split(":") for line in read(language)["same"].strip().splitlines()]
    return {other.strip(): name for name, others in lines for other in others.split(",")}


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of these, the longest first; of Latin ones whole words only."""
    longest = sorted(words, key=lambda word: (-len(word), word))
    bound = r"(?<![a-z0-9]){}(?![a-z0-9])"
    return re.compile("|".join(bound.format(re.escape(w)) if w.isascii() else re.escape(w) for w in longest))


@cache
def _other_names(language: str) -> re.Pattern[str]:
    return _any_of(_names(language))


@cache
def _chinese_words() -> re.Pattern[str]:
    """A pattern for the Chinese words of the index, and those that it leaves out."""
    texts = [entry["words"] for topic, entry in read("zh").items() if topic not in LISTS]
    texts += [*_names("zh").values(), *_words("zh", "subject", "everyday")]
    known = {word for text in texts for word in CHINESE.findall(text) if len(word) > 1}
    return _any_of(known | _words("zh", "stop"))


def stem(word: str) -> str:
    """A word without its ending, cut to `STEM` letters: "scaling", "scale" -> "scal"."""
    return DOUBLED.sub(r"\1", ENDING.sub("", word))[:STEM]


def plain(text: str) -> str:
    """A text in lower case, with the index's names of things."""
    language = language_of(text)
    lower = unicodedata.normalize("NFKC", text).lower()
    return _other_names(language).sub(lambda match: f" {_names(language)[match[0]]} ", lower)


def terms(text: str) -> frozenset[str]:
    """The terms of a text, as the module says."""
    named = plain(text)
    words = {stem(word) for word in WORD.findall(named) if word not in _words("en", "stop")}
    words |= set(NAME.findall(named))
    runs = [part for run in CHINESE.findall(named) for part in _chinese_words().split(run)]
    runs += [word for word in _chinese_words().findall(named) if word not in _words("zh", "stop")]
    pairs = {run[i : i + 2] for run in runs for i in range(len(run) - 1)}
    return frozenset(words | pairs | {character for run in runs for character in run})


@cache
def field() -> frozenset[str]:
    """The terms of the words of the field."""
    words = [w for lang in LANGUAGES for w in (*_words(lang, "subject", "everyday"), *_names(lang).values())]
    return frozenset(term for word in words for term in terms(word))


def tells(term: str) -> bool:
    """Whether a term says what a question is about: numbers do not, nor do single characters but q, k, v."""
    return not term.isdigit() and (len(term) > 1 or term in _words("en", "subject"))


def names(question: str) -> list[frozenset[str]]:
    """The terms of each name of a question: a Latin word among Chinese ones, a capital letter behind the first word."""
    if language_of(question) == "zh":
        return [terms(word) for word in WORD.findall(plain(question)) if len(word) > 2]
    return [terms(word) for word in CAPITAL.findall(question)]


def least(question: str) -> float:
    """The score that an answer to a question needs, as the module says."""
    text = f"{question.lower()} {plain(question)}"
    latin = frozenset(word for form in (WORD, NAME) for word in form.findall(text))

    def count(name: str) -> int:
        return len(latin & _words("en", name)) + sum(word in text for word in _words("zh", name))

    if count("beside") or not _words("en", "beside").isdisjoint(word.removesuffix("s") for word in latin):
        return math.inf
    points = 3 * count("subject") + count("everyday")
    return max(LEAST, min(SURE, SURE - DROP * (points - 1)))
