"""The terms of a text, and the word lists of the index: words of its subject, and synonyms."""

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
    """Returns "zh" for a text with Chinese characters, else "en"."""
    return "zh" if CHINESE.search(text) else "en"


@cache
def read(language: str) -> dict[str, Any]:
    """Returns the word lists and the entries of one language. Raises ConfigError for an unknown language."""
    return table(check_language(language, "questions"))


def table(name: str) -> dict[str, Any]:
    """Returns a TOML table of this folder."""
    text = files("headway_lab.questions").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def _words(language: str, *lists: str) -> frozenset[str]:
    return frozenset(word for name in lists for word in read(language)[name].split())


@cache
def _names(language: str) -> dict[str, str]:
    """Returns the index's name of a thing, keyed by each synonym."""
    lines = [line.split(":") for line in read(language)["same"].strip().splitlines()]
    return {synonym.strip(): name for name, synonyms in lines for synonym in synonyms.split(",")}


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern for any of these words, the longest first; Latin words match only as whole words."""
    longest = sorted(words, key=lambda word: (-len(word), word))
    bound = r"(?<![a-z0-9]){}(?![a-z0-9])"
    return re.compile("|".join(bound.format(re.escape(w)) if w.isascii() else re.escape(w) for w in longest))


@cache
def _other_names(language: str) -> re.Pattern[str]:
    return _any_of(_names(language))


@cache
def _chinese_words() -> re.Pattern[str]:
    """Returns a pattern for the Chinese words of the index and its stop words."""
    texts = [entry["words"] for topic, entry in read("zh").items() if topic not in LISTS]
    texts += [*_names("zh").values(), *_words("zh", "subject", "everyday")]
    known = {word for text in texts for word in CHINESE.findall(text) if len(word) > 1}
    return _any_of(known | _words("zh", "stop"))


def stem(word: str) -> str:
    """Returns a word without its ending, cut to `STEM` letters: "scaling", "scale" -> "scal"."""
    return DOUBLED.sub(r"\1", ENDING.sub("", word))[:STEM]


def plain(text: str) -> str:
    """Returns a text in lower case, with synonyms replaced by the index's names."""
    language = language_of(text)
    lower = unicodedata.normalize("NFKC", text).lower()
    return _other_names(language).sub(lambda match: f" {_names(language)[match[0]]} ", lower)


def terms(text: str) -> frozenset[str]:
    """Returns the terms of a text, as the docstring of `headway_lab.questions` defines them."""
    named = plain(text)
    words = {stem(word) for word in WORD.findall(named) if word not in _words("en", "stop")}
    words |= set(NAME.findall(named))
    runs = [part for run in CHINESE.findall(named) for part in _chinese_words().split(run)]
    runs += [word for word in _chinese_words().findall(named) if word not in _words("zh", "stop")]
    pairs = {run[i : i + 2] for run in runs for i in range(len(run) - 1)}
    return frozenset(words | pairs | {character for run in runs for character in run})


@cache
def field() -> frozenset[str]:
    """Returns the terms of the words of the field."""
    words = [w for lang in LANGUAGES for w in (*_words(lang, "subject", "everyday"), *_names(lang).values())]
    return frozenset(term for word in words for term in terms(word))


def tells(term: str) -> bool:
    """Returns whether a term says what a question is about: numbers do not, nor do single characters except q, k, v."""
    return not term.isdigit() and (len(term) > 1 or term in _words("en", "subject"))


def names(question: str) -> list[frozenset[str]]:
    """Returns the terms of each name in a question: in Chinese each Latin word, in English each capitalized word but
    the first."""
    if language_of(question) == "zh":
        return [terms(word) for word in WORD.findall(plain(question)) if len(word) > 2]
    return [terms(word) for word in CAPITAL.findall(question)]


def least(question: str) -> float:
    """Returns the score that an answer to a question needs, as the docstring of `headway_lab.questions` defines it."""
    text = f"{question.lower()} {plain(question)}"
    latin = frozenset(word for form in (WORD, NAME) for word in form.findall(text))

    def count(name: str) -> int:
        return len(latin & _words("en", name)) + sum(word in text for word in _words("zh", name))

    if count("beside") or not _words("en", "beside").isdisjoint(word.removesuffix("s") for word in latin):
        return math.inf
    points = 3 * count("subject") + count("everyday")
    return max(LEAST, min(SURE, SURE - DROP * (points - 1)))
