"""What topics ask and say: data. `topics.toml` has what is of no language; `en.toml`, a table for a language, has
questions, formulas and the sentences of reports as templates, which a topic's numbers are put into (`Topic.told`)."""

import string
import tomllib
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from headway_lab.explain.report import Claim, Report


class _Sentence(string.Formatter):
    """As `str.format`; but `it` is said by the phrase of its type, or the word for a truth, where there is one. Of a
    sequence or a mapping each value is formatted, and told after its name, with commas between them, or semicolons
    where one has a comma of its own; the word for `none` is said of an empty one."""

    def __init__(self, phrases: Mapping[str, str]) -> None:
        self.phrases = phrases

    def format_field(self, value: Any, format_spec: str) -> str:
        kind = str(value) if isinstance(value, bool) else type(value).__name__
        if phrase := self.phrases.get(kind):
            return self.vformat(phrase, (), {"it": value})
        if isinstance(value, Mapping):
            parts = [f"{name} {self.format_field(own, format_spec)}" for name, own in value.items()]
        elif isinstance(value, (list, tuple)):
            parts = [self.format_field(own, format_spec) for own in value]
        else:
            return str(super().format_field(value, format_spec))
        return ("; " if any("," in part for part in parts) else ", ").join(parts) or self.phrases["none"]


@dataclass(frozen=True)
class Topic:
    """What a topic asks, what is verified, as text, and templates of its report: its setting, what was found, its
    claims by key, and a picture, where that is one of words; and phrases for values, by type.

    seconds, quick, tex   as topics.toml has them; none of what is no topic of `headway explain`
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

    def told(self, name: str, found: Report, **known: Any) -> Report:
        """A report of keys and values as one of sentences. Templates have the report's values, its `first` and `last`
        row and the `count` of rows, and what else is known: the settings of the run, and constants of the topic. Raises
        KeyError for a claim without its sentence, and for a name that a sentence has and nobody knows."""
        ends = {"first": found.rows[0], "last": found.rows[-1], "count": len(found.rows)}
        names, sentence = ChainMap({**found.values}, ends, known), _Sentence(self.phrases)
        claims: dict[Claim, bool | None] = {}
        for claim, seen in found.claims.items():
            key, own = claim if isinstance(claim, tuple) else (claim, "")
            claims[sentence.vformat(self.claims[key], (), names.new_child({"name": own}))] = seen
        setting, finding, picture = (
            sentence.vformat(text, (), names) for text in (self.setting, self.finding, self.picture)
        )
        return replace(
            found,
            topic=name,
            question=self.question,
            formula=self.formula,
            claims=claims,
            setting=setting,
            finding=finding,
            values={},
            picture=found.picture or picture,
        )


def read(name: str) -> dict[str, Any]:
    """A table of this folder."""
    return tomllib.loads(files("headway_lab.explain").joinpath(f"{name}.toml").read_text(encoding="utf-8"))


@cache
def groups(language: str = "en") -> dict[str, dict[str, Topic]]:
    """The topics by group, in one language."""
    said = read(language)
    return {
        group: {name: Topic(**said[name], **own, phrases=said["phrases"]) for name, own in topics.items()}
        for group, topics in read("topics").items()
    }


GROUPS = groups()
TOPICS = {name: topic for group in GROUPS.values() for name, topic in group.items()}
