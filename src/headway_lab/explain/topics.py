"""Topics as data. `topics.toml` has the fields without language; `en.toml` and `zh.toml`, a table for a
language, have questions, formulas and the sentences of reports as templates, which a topic's numbers are put into
(`Topic.told`); names in Chinese stand in `zh.toml` under `labels`, by their English."""

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
    """As `str.format`; but `it` is said by the phrase of its type, or the word for a truth, where there is one, and a
    name by its translation. Of a sequence or a mapping each value is formatted, and told after its name, with the
    phrase for a comma between them, or that for a semicolon where one has a comma of its own; the word for `none` is
    said of an empty one."""

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
    """The question of a topic, its formula, as text, and templates of its report: its setting, its finding, its claims
    by key, and a picture, where that is one of words; and phrases for values, by type.

    seconds, quick, tex   as topics.toml has them; none of what is no topic of `headway explain`
    language              of all of it
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
        """A report of keys and values as one of sentences. Templates have the report's values, its `first` and `last`
        row and the `count` of rows, and `known` names: the settings of the run, and constants of the topic. Raises
        KeyError for a claim without its sentence, and for a name that a sentence has and nobody knows."""
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
    """The topics by group, in one language."""
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
    """The topics by name, in one language."""
    return {name: topic for group in groups(language).values() for name, topic in group.items()}


GROUPS, TOPICS = groups(), topics_in("en")
