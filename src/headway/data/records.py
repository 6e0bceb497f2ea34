"""Reading training records. The kind of a record is found by its keys:

| kind | keys |
|---|---|
| `Chat` | messages; conversations (ShareGPT); instruction, output, with input, history, system (Alpaca) |
| | question, answer; prompt, completion (of messages) |
| `Completion` | prompt, completion (of text) |
| `Preference` | chosen, rejected, with prompt, messages, conversations or instruction |
| `Labelled` | text, sentence or text_a, with label; and text_pair or text_b |
| | sentence1, sentence2, label; premise, hypothesis, label |
| `Tagged` | tokens or words, with tags, ner_tags or labels |
| `Triplet` | anchor or query, positive, with negative; A, B, C, label (CAIL2019-SCM) |
| `Question` | question, context, answers (SQuAD) |

`FORMS` is the table of these keys; to support another format of a kind, add a row. Other keys are ignored. Files are
those of `headway.data.values`, and .txt with text TAB label on each line if labelled texts are accepted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from headway.data import conversations, values
from headway.data.hub import local
from headway.data.record_kinds import (
    KINDS,
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
from headway.data.values import string
from headway.errors import DataError, as_error, did_you_mean

TEXTS = "text", "sentence", "text_a"
PAIRS = "text_pair", "text_b"
TAGS = "tags", "ner_tags", "labels"
Value = Mapping[str, Any]


def _names(value: Value, key: str) -> list[str]:
    if not isinstance(value[key], list):
        raise DataError(f'"{key}" must be a list, got {type(value[key]).__name__}')
    return [_name(name, f"{key}[{i}]") for i, name in enumerate(value[key])]


def _name(value: Any, key: str = "label") -> str:
    """Returns a class or tag as a string. Raises DataError unless it is a string, a whole number or a boolean."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int)) and value != "":
        return str(value)
    raise DataError(f'"{key}" must be a non-empty string, a whole number or a boolean, got {value!r}')


def _labelled(value: Value, text: str, pairs: Sequence[str]) -> Labelled:
    """Reads a labelled text and, under the first of the keys `pairs` that is present, the second text of a pair."""
    pair = next((string(value, key) for key in pairs if value.get(key) is not None), None)
    return Labelled(string(value, text), pair, _name(value["label"]))


def _tagged(value: Value, words: str, tags: str) -> Tagged:
    tagged = Tagged(_names(value, words), _names(value, tags))
    if len(tagged.words) != len(tagged.tags) or not tagged.words:
        raise DataError(
            f"{len(tagged.words)} words and {len(tagged.tags)} tags; there must be one or more, as many tags as words"
        )
    return tagged


def _triplet(value: Value, anchor: str) -> Triplet:
    negative = string(value, "negative") if value.get("negative") is not None else None
    return Triplet(string(value, anchor), string(value, "positive"), negative)


def _cail(value: Value) -> Triplet:
    """Reads a triplet whose label names the text that is more like A (Xiao et al. 2019, CAIL2019-SCM)."""
    label = value["label"]
    if label not in ("B", "C"):
        raise DataError(f'"label" must be "B" or "C", the text that is more like A; got {label!r}')
    return Triplet(string(value, "A"), string(value, label), string(value, "C" if label == "B" else "B"))


def _question(value: Value) -> Question:
    context, raw = string(value, "context"), value["answers"]
    if isinstance(raw, dict) and raw.keys() >= {"text", "answer_start"}:
        texts, starts = raw["text"], raw["answer_start"]
        if not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)):
            raise DataError('"answers" needs lists "text" and "answer_start" of equal length')
        raw = [{"text": t, "answer_start": s} for t, s in zip(texts, starts, strict=True)]
    if not isinstance(raw, list):
        raise DataError(f'"answers" must be a list, got {type(raw).__name__}')
    answers = tuple(_answer(answer, context, f"answers[{i}]") for i, answer in enumerate(raw))
    return Question(string(value, "question"), context, answers)


def _answer(value: Any, context: str, place: str) -> Answer:
    text, start = (value.get("text"), value.get("answer_start")) if isinstance(value, dict) else (None, None)
    if not isinstance(text, str) or not text or type(start) is not int:
        raise DataError(
            f'{place} needs a non-empty string "text" and a whole number "answer_start"; got {value!r}'
        )
    if start == NOWHERE:
        return Answer(text, start)
    if start < 0 or not context.startswith(text, start):
        actual = context[max(start, 0) : max(start, 0) + len(text)]
        raise DataError(f"{place}: {text!r} is not at character {start} of the context; {actual!r} is")
    return Answer(text, start)


def _chat(value: Value, messages: Callable[[Value], Messages]) -> Chat:
    return Chat(messages(value), conversations.tools(value))


def _completion(value: Value) -> Completion | Chat:
    if isinstance(value["prompt"], list):
        return _chat(value, conversations.completed)
    completion = Completion(string(value, "prompt"), string(value, "completion"))
    if not completion.completion:
        raise DataError('"completion" is empty')
    return completion


class Form(NamedTuple):
    """A format of records: keys that must be present, the function that reads a record, and the kinds it returns."""

    keys: tuple[str, ...]
    read: Callable[[Value], Record]
    kinds: tuple[type[Record], ...]


def _form(keys: str, read: Callable[..., Record], *kinds: type[Record], **how: Any) -> Form:
    """Returns the form of records with these keys (separated by spaces), which `read(value, **how)` reads."""
    return Form(tuple(keys.split()), partial(read, **how), kinds)


# The first form whose keys are present and whose kind is accepted is used: more specific forms stand first.
FORMS: tuple[Form, ...] = (
    _form("chosen rejected", lambda value: Preference(*conversations.preference(value)), Preference),
    _form("messages", _chat, Chat, messages=conversations.messages),
    _form("conversations", _chat, Chat, messages=conversations.sharegpt),
    _form("instruction output", _chat, Chat, messages=conversations.alpaca),
    _form("prompt completion", _completion, Completion, Chat),
    _form("question context answers", _question, Question),
    _form("question answer", _chat, Chat, messages=conversations.answered),
    _form("A B C label", _cail, Triplet),
    *(_form(f"{anchor} positive", _triplet, Triplet, anchor=anchor) for anchor in ("anchor", "query")),
    *(
        _form(f"{words} {tags}", _tagged, Tagged, words=words, tags=tags)
        for words in ("tokens", "words")
        for tags in TAGS
    ),
    _form("sentence1 sentence2 label", _labelled, Labelled, text="sentence1", pairs=("sentence2",)),
    _form("premise hypothesis label", _labelled, Labelled, text="premise", pairs=("hypothesis",)),
    *(_form(f"{text} label", _labelled, Labelled, text=text, pairs=PAIRS) for text in TEXTS),
)


def read_records(
    path: str | Path, *kinds: type[Record], skipped: Callable[[DataError], None] | None = None
) -> Iterator[Record]:
    """Yields the records of a file in order; `kinds` are the accepted ones (default: all).

    A record that cannot be read raises DataError with file and line or, if `skipped` is given, is left out and
    `skipped` is called with the error. A file or line that cannot be parsed at all always raises DataError.
    """
    accepted = kinds or KINDS
    file = local(path)
    plain = Labelled in accepted and file.name.endswith((".txt", ".txt.gz"))
    for where, value in (_labelled_lines if plain else values.values)(file):
        try:
            record = _record(value, where, accepted)
        except DataError as error:
            if skipped is None:
                raise
            skipped(error)
        else:
            yield record


def _labelled_lines(path: Path) -> Iterator[values.Value]:
    for where, line in values.lines(path):
        text, tab, label = line.rpartition("\t")
        if not line:
            continue
        if not tab:
            raise DataError(f"{where}: expected text TAB label, but the line has no TAB")
        yield where, {"text": text, "label": label}


def _record(value: Any, where: str, accepted: Sequence[type[Record]]) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"{where}: an object is expected, got {type(value).__name__}")
    _check_strings(value, where)
    forms = [form for form in FORMS if value.keys() >= {*form.keys}]
    form = next((f for f in forms if {*f.kinds} & {*accepted}), None)
    if form is None:
        raise _unknown(value, where, accepted, forms[0].kinds if forms else ())
    with as_error(DataError, where):
        record = form.read(value)
    if type(record) not in accepted:
        raise _unknown(value, where, accepted, (type(record),))
    return replace(record, where=where)


def _unknown(
    value: Mapping[str, Any], where: str, accepted: Sequence[type[Record]], kinds: Sequence[type[Record]]
) -> DataError:
    """Returns the error for a record of another kind, which names its kind and the accepted ones."""
    usable = [form for form in FORMS if {*form.kinds} & {*accepted}]
    known_keys = sorted({key for form in usable for key in form.keys})
    hint = next((h for key in value if key not in known_keys and (h := did_you_mean(key, known_keys))), "")
    keys = "; ".join(", ".join(form.keys) for form in usable)
    names = " or ".join(kind.__name__ for kind in accepted)
    actual = " or ".join(sorted(kind.__name__ for kind in kinds)) or "of no known kind"
    return DataError(
        f"{where}: this record is {actual}, with the keys {sorted(value)}{hint}; expected {names}, with the keys: "
        f"{keys}"
    )


def _check_strings(value: Any, where: str) -> None:
    """Raises DataError for a string inside the value that UTF-8 cannot hold, or that has a NUL character."""
    if isinstance(value, str):
        values.checked(value, where)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_strings(inner, where)
