"""The kinds of training records; `where` of each is `file:line`. `headway.data.records` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Text:
    """Plain text."""

    text: str
    where: str = ""


@dataclass(frozen=True)
class Chat:
    """Messages with role and content, as chat templates take them; an assistant's with `"weight": 0` is not trained.

    tools: descriptions of functions, for templates that show them."""

    messages: Messages
    tools: Sequence[Any] | None = None
    where: str = ""


@dataclass(frozen=True)
class Completion:
    """Text to be continued, and how."""

    prompt: str
    completion: str
    where: str = ""


@dataclass(frozen=True)
class Preference:
    """Messages, and two ways to go on."""

    prompt: Messages
    chosen: Messages
    rejected: Messages
    where: str = ""


@dataclass(frozen=True)
class Labelled:
    """A text, or a pair, and its class; a number or a truth value is written as in JSON ("0", "true")."""

    text: str
    pair: str | None
    label: str
    where: str = ""


@dataclass(frozen=True)
class Tagged:
    """Words, and the tag of each."""

    words: Sequence[str]
    tags: Sequence[str]
    where: str = ""


@dataclass(frozen=True)
class Triplet:
    """A text, one that is like it, and (if known) one that is less so."""

    anchor: str
    positive: str
    negative: str | None
    where: str = ""


NOWHERE = -1


class Answer(NamedTuple):
    """Text that stands at character `start` of a context; at NOWHERE, if it is in other words than the context's: one
    can be measured by it, and nothing is trained (CMRC)."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question, a text, and the answers in it: none where it cannot be answered."""

    question: str
    context: str
    answers: Sequence[Answer]
    id: str
    where: str = ""


@dataclass(frozen=True)
class Translated:
    """A text and its translation."""

    source: str
    target: str
    where: str = ""


Record = Text | Chat | Completion | Preference | Labelled | Tagged | Triplet | Question | Translated
KINDS: tuple[type[Record], ...] = (
    Text, Chat, Completion, Preference, Labelled, Tagged, Triplet, Question, Translated
)  # fmt: skip
