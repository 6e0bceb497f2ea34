"""How records of each kind are written: a table from keys to readers. Another way to write one is a row of it."""

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
    Text,
    Translated,
    Triplet,
)
from headway.errors import DataError

TEXTS = "text", "sentence", "text_a"
TAGS = "tags", "ner_tags", "labels"


class Row(NamedTuple):
    """An object of a file, and where it stands."""

    value: Mapping[str, Any]
    where: str

    def first(self, *keys: str) -> str:
        """The key among `keys` that is there."""
        return next(key for key in keys if key in self.value)

    def text(self, *keys: str, empty: bool = True) -> str:
        """The string under the first of `keys` that is there."""
        key = self.first(*keys)
        found = self.value[key]
        if not isinstance(found, str):
            raise DataError(f'{self.where}: "{key}" must be a string, got {type(found).__name__}')
        if not (empty or found):
            raise DataError(f'{self.where}: "{key}" is empty')
        return found

    def strings(self, *keys: str) -> list[str]:
        """The list under the first of `keys` that is there: strings, or whole numbers that are written as such."""
        key = self.first(*keys)
        found = self.value[key]
        if not isinstance(found, list):
            raise DataError(f'{self.where}: "{key}" must be a list, got {type(found).__name__}')
        return [self.name(one, f"{key}[{i}]") for i, one in enumerate(found)]

    def name(self, found: Any, key: str) -> str:
        """A class or tag: a string, a whole number or a truth value."""
        if isinstance(found, bool):
            return "true" if found else "false"
        if isinstance(found, (str, int)) and found != "":
            return str(found)
        raise DataError(f'{self.where}: "{key}" must be a string or a whole number, got {found!r}')


def _labelled(row: Row) -> Labelled:
    pair = [row.text(key) for key in ("text_pair", "text_b") if row.value.get(key) is not None][:1]
    text = row.text(*TEXTS)
    return Labelled(text, pair[0] if pair else None, row.name(row.value["label"], "label"), row.where)


def _pair(first: str, second: str) -> Callable[[Row], Labelled]:
    def read(row: Row) -> Labelled:
        return Labelled(row.text(first), row.text(second), row.name(row.value["label"], "label"), row.where)

    return read


def _keywords(row: Row) -> Labelled:
    """Are these the keywords of that abstract? (CLUE, csl)"""
    label = row.name(row.value["label"], "label")
    return Labelled(" ".join(row.strings("keyword")), row.text("abst"), label, row.where)


def _pronoun(row: Row) -> Labelled:
    """Does [the pronoun] mean _the noun_? Marked as CLUE's baseline does it (cluewsc)."""
    text, target = row.text("text"), row.value["target"]
    marks = []
    try:
        for n, mark in ((1, ("_", "_")), (2, ("[", "]"))):
            marks.append((int(target[f"span{n}_index"]), str(target[f"span{n}_text"]), mark))
    except (TypeError, KeyError, ValueError):
        raise DataError(
            f'{row.where}: "target" needs span1_text, span1_index, span2_text, span2_index'
        ) from None
    for at, span, (before, after) in sorted(marks, reverse=True):
        if not 0 <= at <= len(text) or not text.startswith(span, at):
            raise DataError(f"{row.where}: {span!r} does not stand at character {at} of the text")
        text = f"{text[:at]}{before}{span}{after}{text[at + len(span) :]}"
    return Labelled(text, None, row.name(row.value["label"], "label"), row.where)


def _tagged(row: Row) -> Tagged:
    words, tags = row.strings("tokens", "words"), row.strings(*TAGS)
    if len(words) != len(tags) or not words:
        raise DataError(f"{row.where}: {len(words)} words and {len(tags)} tags; each word has one")
    return Tagged(words, tags, row.where)


def _triplet(row: Row) -> Triplet:
    negative = row.text("negative") if row.value.get("negative") is not None else None
    return Triplet(row.text("anchor", "query"), row.text("positive"), negative, row.where)


def _cail(row: Row) -> Triplet:
    """The label names the text that is more like A (Xiao et al. 2019, CAIL2019-SCM)."""
    label = row.value["label"]
    if label not in ("B", "C"):
        raise DataError(
            f'{row.where}: "label" must be "B" or "C", the text that is more like A; got {label!r}'
        )
    return Triplet(row.text("A"), row.text(label), row.text("C" if label == "B" else "B"), row.where)


def _question(row: Row) -> Question:
    context, found = row.text("context"), row.value["answers"]
    if isinstance(found, dict) and found.keys() >= {"text", "answer_start"}:
        texts, starts = found["text"], found["answer_start"]
        if not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)):
            raise DataError(f'{row.where}: "answers" has lists "text" and "answer_start" of one length')
        found = [{"text": t, "answer_start": s} for t, s in zip(texts, starts, strict=True)]
    if not isinstance(found, list):
        raise DataError(f'{row.where}: "answers" must be a list, got {type(found).__name__}')
    answers = tuple(_answer(one, context, f"{row.where}: answers[{i}]") for i, one in enumerate(found))
    return Question(row.text("question"), context, answers, str(row.value.get("id", row.where)), row.where)


def _answer(found: Any, context: str, where: str) -> Answer:
    text, start = (found.get("text"), found.get("answer_start")) if isinstance(found, dict) else (None, None)
    if not isinstance(text, str) or type(start) is not int:
        raise DataError(f'{where} needs a string "text" and a whole number "answer_start"; got {found!r}')
    if start == NOWHERE and text:
        return Answer(text, start)
    if start < 0 or not text or not context.startswith(text, start):
        there = context[max(start, 0) : max(start, 0) + len(text)]
        raise DataError(
            f"{where}: {text!r} does not stand at character {start} of the context; {there!r} does"
        )
    return Answer(text, start)


def _chat(read: Callable[[Mapping[str, Any], str], Messages]) -> Callable[[Row], Chat]:
    def of_row(row: Row) -> Chat:
        return Chat(read(row.value, row.where), conversations.tools(row.value, row.where), row.where)

    return of_row


def _completion(row: Row) -> Completion | Chat:
    if isinstance(row.value["prompt"], list):
        return Chat(
            conversations.completed(row.value, row.where),
            conversations.tools(row.value, row.where),
            row.where,
        )
    return Completion(row.text("prompt"), row.text("completion", empty=False), row.where)


def _preference(row: Row) -> Preference:
    prompt, chosen, rejected = conversations.preference(row.value, row.where)
    return Preference(prompt, chosen, rejected, row.where)


class Form(NamedTuple):
    """Keys that must be there, the kinds that such a record may be of, and how it is read."""

    keys: tuple[str, ...]
    kinds: frozenset[type[Record]]
    read: Callable[[Row], Record]


def _form(keys: str, read: Callable[[Row], Record], *kinds: type[Record]) -> Form:
    return Form(tuple(keys.split()), frozenset(kinds), read)


# The first that has its keys and gives a kind that was asked for is taken: the more particular stands first.
FORMS: tuple[Form, ...] = (
    _form("chosen rejected", _preference, Preference),
    _form("messages", _chat(conversations.messages), Chat),
    _form("conversations", _chat(conversations.sharegpt), Chat),
    _form("instruction output", _chat(conversations.alpaca), Chat),
    _form("prompt completion", _completion, Completion, Chat),
    _form("question context answers", _question, Question),
    _form("question answer", _chat(conversations.answered), Chat),
    _form("input output", _chat(conversations.guanaco), Chat),
    _form("A B C label", _cail, Triplet),
    _form("anchor positive", _triplet, Triplet),
    _form("query positive", _triplet, Triplet),
    *(_form(f"{words} {tags}", _tagged, Tagged) for words in ("tokens", "words") for tags in TAGS),
    _form(
        "source target", lambda row: Translated(row.text("source"), row.text("target"), row.where), Translated
    ),
    _form("sentence1 sentence2 label", _pair("sentence1", "sentence2"), Labelled),
    _form("premise hypothesis label", _pair("premise", "hypothesis"), Labelled),
    _form("keyword abst label", _keywords, Labelled),
    _form("text target label", _pronoun, Labelled),
    *(_form(f"{text} label", _labelled, Labelled) for text in TEXTS),
    _form("text", lambda row: Text(row.text("text"), row.where), Text),
)
