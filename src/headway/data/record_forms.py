"""How records of each kind are written: a table from keys to readers. Another way to write one is a row of it.

Readers raise DataError for what is no such record; whoever calls them names its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from headway.data import conversations
from headway.data.record_kinds import (
    NOWHERE,
    Answer,
    Chat,
    Completion,
    Labelled,
    Messages,
    Preference,
    Question,
    Record,
    Tagged,
    Triplet,
)
from headway.errors import DataError

TEXTS = "text", "sentence", "text_a"
TAGS = "tags", "ner_tags", "labels"
Value = Mapping[str, Any]


def _text(value: Value, key: str) -> str:
    found = value[key]
    if not isinstance(found, str):
        raise DataError(f'"{key}" must be a string, got {type(found).__name__}')
    return found


def _names(value: Value, key: str) -> list[str]:
    if not isinstance(value[key], list):
        raise DataError(f'"{key}" must be a list, got {type(value[key]).__name__}')
    return [_name(one, f"{key}[{i}]") for i, one in enumerate(value[key])]


def _name(found: Any, key: str = "label") -> str:
    """A class or tag: a string, a whole number or a truth value."""
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, (str, int)) and found != "":
        return str(found)
    raise DataError(f'"{key}" must be a string or a whole number, got {found!r}')


def _labelled(text: str, *pairs: str) -> Callable[[Value], Labelled]:
    """A text and, under the first key that is there, another one."""

    def read(value: Value) -> Labelled:
        pair = next((_text(value, key) for key in pairs if value.get(key) is not None), None)
        return Labelled(_text(value, text), pair, _name(value["label"]))

    return read


def _tagged(words: str, tags: str) -> Callable[[Value], Tagged]:
    def read(value: Value) -> Tagged:
        found = Tagged(_names(value, words), _names(value, tags))
        if len(found.words) != len(found.tags) or not found.words:
            raise DataError(f"{len(found.words)} words and {len(found.tags)} tags; each word has one")
        return found

    return read


def _triplet(anchor: str) -> Callable[[Value], Triplet]:
    def read(value: Value) -> Triplet:
        negative = _text(value, "negative") if value.get("negative") is not None else None
        return Triplet(_text(value, anchor), _text(value, "positive"), negative)

    return read


def _cail(value: Value) -> Triplet:
    """The label names the text that is more like A (Xiao et al. 2019, CAIL2019-SCM)."""
    label = value["label"]
    if label not in ("B", "C"):
        raise DataError(f'"label" must be "B" or "C", the text that is more like A; got {label!r}')
    return Triplet(_text(value, "A"), _text(value, label), _text(value, "C" if label == "B" else "B"))


def _question(value: Value) -> Question:
    context, found = _text(value, "context"), value["answers"]
    if isinstance(found, dict) and found.keys() >= {"text", "answer_start"}:
        texts, starts = found["text"], found["answer_start"]
        if not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)):
            raise DataError('"answers" has lists "text" and "answer_start" of one length')
        found = [{"text": t, "answer_start": s} for t, s in zip(texts, starts, strict=True)]
    if not isinstance(found, list):
        raise DataError(f'"answers" must be a list, got {type(found).__name__}')
    answers = tuple(_answer(one, context, f"answers[{i}]") for i, one in enumerate(found))
    return Question(_text(value, "question"), context, answers)


def _answer(found: Any, context: str, place: str) -> Answer:
    text, start = (found.get("text"), found.get("answer_start")) if isinstance(found, dict) else (None, None)
    if not isinstance(text, str) or type(start) is not int:
        raise DataError(f'{place} needs a string "text" and a whole number "answer_start"; got {found!r}')
    if start == NOWHERE and text:
        return Answer(text, start)
    if start < 0 or not text or not context.startswith(text, start):
        there = context[max(start, 0) : max(start, 0) + len(text)]
        raise DataError(
            f"{place}: {text!r} does not stand at character {start} of the context; {there!r} does"
        )
    return Answer(text, start)


def _chat(read: Callable[[Value], Messages]) -> Callable[[Value], Chat]:
    return lambda value: Chat(read(value), conversations.tools(value))


def _completion(value: Value) -> Completion | Chat:
    if isinstance(value["prompt"], list):
        return _chat(conversations.completed)(value)
    found = Completion(_text(value, "prompt"), _text(value, "completion"))
    if not found.completion:
        raise DataError('"completion" is empty')
    return found


class Form(NamedTuple):
    """Keys that must be there, how such a record is read, and the kinds that it may be of."""

    keys: tuple[str, ...]
    read: Callable[[Value], Record]
    kinds: tuple[type[Record], ...]


def _form(keys: str, read: Callable[[Value], Record], *kinds: type[Record]) -> Form:
    return Form(tuple(keys.split()), read, kinds)


# The first that has its keys and gives a kind that was asked for is taken: the more particular stands first.
FORMS: tuple[Form, ...] = (
    _form("chosen rejected", lambda value: Preference(*conversations.preference(value)), Preference),
    _form("messages", _chat(conversations.messages), Chat),
    _form("conversations", _chat(conversations.sharegpt), Chat),
    _form("instruction output", _chat(conversations.alpaca), Chat),
    _form("prompt completion", _completion, Completion, Chat),
    _form("question context answers", _question, Question),
    _form("question answer", _chat(conversations.answered), Chat),
    _form("A B C label", _cail, Triplet),
    *(_form(f"{anchor} positive", _triplet(anchor), Triplet) for anchor in ("anchor", "query")),
    *(
        _form(f"{words} {tags}", _tagged(words, tags), Tagged)
        for words in ("tokens", "words")
        for tags in TAGS
    ),
    _form("sentence1 sentence2 label", _labelled("sentence1", "sentence2"), Labelled),
    _form("premise hypothesis label", _labelled("premise", "hypothesis"), Labelled),
    *(_form(f"{text} label", _labelled(text, "text_pair", "text_b"), Labelled) for text in TEXTS),
)
