"""The kinds of training records, which `headway.data.records` reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Record:
    """One example of a data set; `where` is its `file:line`."""

    where: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Chat(Record):
    """Messages with role and content, as chat templates take them; an assistant message with `"weight": 0` is not
    trained.

    tools: descriptions of functions, for templates that show them."""

    messages: Messages
    tools: Sequence[Any] | None = None


@dataclass(frozen=True)
class Completion(Record):
    """A text and its continuation."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Preference(Record):
    """Messages, and a preferred and a rejected continuation."""

    prompt: Messages
    chosen: Messages
    rejected: Messages


@dataclass(frozen=True)
class Labelled(Record):
    """A text or a pair of texts, and its class; a class that is a number or boolean is written as in JSON ("0",
    "true")."""

    text: str
    pair: str | None
    label: str


@dataclass(frozen=True)
class Tagged(Record):
    """The words of a text, and the tag of each."""

    words: Sequence[str]
    tags: Sequence[str]


@dataclass(frozen=True)
class Triplet(Record):
    """A text, a similar one, and (if known) a less similar one."""

    anchor: str
    positive: str
    negative: str | None


NOWHERE = -1


class Answer(NamedTuple):
    """A text that begins at character `start` of a context. `start` is NOWHERE if the answer is worded differently from
    the context (CMRC): it is then used in evaluation, and not trained."""

    text: str
    start: int


@dataclass(frozen=True)
class Question(Record):
    """A question, a context, and the answers in it; no answers if the context does not answer the question."""

    question: str
    context: str
    answers: Sequence[Answer]


KINDS: tuple[type[Record], ...] = Chat, Completion, Preference, Labelled, Tagged, Triplet, Question
