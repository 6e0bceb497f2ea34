"""Topics as data. `topics.toml` has the language-independent fields; `en.toml` and `zh.toml`, one table per language,
have questions, formulas and the sentences of reports as templates that are filled with a topic's numbers
(`Topic.told`); `zh.toml` also has the Chinese names under `labels`, keyed by the English ones."""

import string
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from headway.language import Translation
from headway_lab.explain.report import Claim, Report, Table
from headway_lab.explain.tables import read, translation


class _Sentence(string.Formatter):
    """`str.format` with other rules for values. A value whose type has a phrase (or a bool with a word) is formatted by
    it, as `it`; a string is translated. Of a sequence or mapping, each value is formatted (preceded by its name in a
    mapping) and joined by the phrase `comma`, or `semicolon` if a part contains a comma; an empty one becomes the
    phrase `none`."""

    def __init__(self, phrases: Mapping[str, str], say: Translation) -> None:
        self.phrases = phrases
        self.say = say

    def format_field(self, value: Any, format_spec: str) -> str:
        kind = str(value) if isinstance(value, bool) else type(value).__name__
        if phrase := self.phrases.get(kind):
            return self.vformat(phrase, (), {"it": value})
        if isinstance(value, Table):
            return value.text(self.say)
        if isinstance(value, Mapping):
            parts = [
                f"{self.say(str(name))} {self.format_field(x, format_spec)}" for name, x in value.items()
            ]
        elif isinstance(value, (list, tuple)):
            parts = [self.format_field(x, format_spec) for x in value]
        else:
            return str(
                super().format_field(self.say(value) if isinstance(value, str) else value, format_spec)
            )
        comma, semicolon = self.phrases["comma"], self.phrases["semicolon"]
        return (semicolon if any(comma.strip() in part for part in parts) else comma).join(
            parts
        ) or self.phrases["none"]


@dataclass(frozen=True)
class Topic:
    """The question of a topic, its formula as text, and templates of its report: its setting, its finding, its claims
    by key, and an optional picture in words; and phrases for values, by type.

    seconds, quick, tex   as in topics.toml; defaults for topics that are not in `headway explain`
    language              language of all texts
    """

    question: str
    formula: str
    setting: str
    finding: str
    claims: Mapping[str, str]
    phrases: Mapping[str, str]
    picture: str = ""
    seconds: int = 0
    quick: Mapping[str, Any] = field(default_factory=dict)
    tex: Sequence[str] = ()
    language: str = "en"

    def told(self, name: str, report: Report, **known: Any) -> Report:
        """Returns a report of keys and values as one of sentences. Templates can use the report's values, its `first`
        and `last` row and the `count` of rows, and the `known` names: settings of the run and constants of the topic.
        Raises KeyError for a claim without a sentence, and for an unknown name in a sentence."""
        ends = {"first": report.rows[0], "last": report.rows[-1], "count": len(report.rows)}
        names = ChainMap({**report.values}, ends, known)
        sentence = _Sentence(self.phrases, translation(self.language))
        claims: dict[Claim, bool | None] = {}
        for claim, seen in report.claims.items():
            key, subject = claim if isinstance(claim, tuple) else (claim, "")
            claims[sentence.vformat(self.claims[key], (), names.new_child({"name": subject}))] = seen
        setting, finding, picture = (
            sentence.vformat(text, (), names) for text in (self.setting, self.finding, self.picture)
        )
        return replace(
            report,
            topic=name,
            question=self.question,
            formula=self.formula,
            claims=claims,
            setting=setting,
            finding=finding,
            values={},
            picture=sentence.format_field(report.picture or picture, ""),
            language=self.language,
        )


@cache
def groups(language: str = "en") -> dict[str, dict[str, Topic]]:
    """Returns the topics by group, in one language."""
    texts = read(language)
    return {
        translation(language)(group): {
            name: Topic(**texts[name], **fields, phrases=texts["phrases"], language=language)
            for name, fields in topics.items()
        }
        for group, topics in read("topics").items()
    }


@cache
def topics_in(language: str) -> dict[str, Topic]:
    """Returns the topics by name, in one language."""
    return {name: topic for group in groups(language).values() for name, topic in group.items()}


GROUPS, TOPICS = groups(), topics_in("en")
