"""The kinds of training records; `where` of each is `file:line`. `headway.data.records` reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Record:
    """One example of a data set."""

    where: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Chat(Record):
    """Messages with role and content, as chat templates take them; an assistant's with `"weight": 0` is not trained.

    tools: descriptions of functions, for templates that show them."""

    messages: Messages
    tools: Sequence[Any] | None = None


@dataclass(frozen=True)
class Completion(Record):
    """Text to be continued, and how."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Preference(Record):
    """Messages, and two ways to go on."""

    prompt: Messages
    chosen: Messages
    rejected: Messages


@dataclass(frozen=True)
class Labelled(Record):
    """A text, or a pair, and its class; a number or a truth value is written as in JSON ("0", "true")."""

    text: str
    pair: str | None
    label: str


@dataclass(frozen=True)
class Tagged(Record):
    """Words, and the tag of each."""

    words: Sequence[str]
    tags: Sequence[str]


@dataclass(frozen=True)
class Triplet(Record):
    """A text, one that is like it, and (if known) one that is less so."""

    anchor: str
    positive: str
    negative: str | None


NOWHERE = -1


class Answer(NamedTuple):
    """Text that stands at character `start` of a context; at NOWHERE, if it is in other words than the context's: one
    can be measured by it, and nothing is trained (CMRC)."""

    text: str
    start: int


@dataclass(frozen=True)
class Question(Record):
    """A question, a text, and the answers in it: none where it cannot be answered."""

    question: str
    context: str
    answers: Sequence[Answer]


KINDS: tuple[type[Record], ...] = Chat, Completion, Preference, Labelled, Tagged, Triplet, Question
