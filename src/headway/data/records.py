"""Records of training data, each of one of a few kinds, which is found by its keys.

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

`FORMS` is the table of these keys; other keys are left alone. Files are those of `headway.data.values`, and .txt: text
TAB label on each line where labelled texts are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.data import values
from headway.data.hub import local
from headway.data.record_forms import FORMS
from headway.data.record_kinds import KINDS, Labelled, Record
from headway.errors import DataError, did_you_mean


def read_records(
    path: str | Path, *kinds: type[Record], skipped: Callable[[DataError], None] | None = None
) -> Iterator[Record]:
    """The records of a file, in its order; `kinds` are those that may be in it (none given: any).

    `skipped` is called with the error of a record that cannot be read, and the record is left out; without it the
    error is raised. Raises DataError with file and line, in any case for what is no JSON.
    """
    wanted = kinds or KINDS
    file = local(path)
    plain = Labelled in wanted and file.name.endswith((".txt", ".txt.gz"))
    for where, value in (_labelled_lines if plain else values.values)(file):
        try:
            record = _record(value, where, wanted)
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
            raise DataError(f"{where}: text TAB label is expected, and there is no TAB")
        yield where, {"text": text, "label": label}


def _record(value: Any, where: str, wanted: Sequence[type[Record]]) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"{where}: an object is expected, got {type(value).__name__}")
    _check_strings(value, where)
    forms = [form for form in FORMS if value.keys() >= {*form.keys}]
    form = next((f for f in forms if {*f.kinds} & {*wanted}), None)
    if form is None:
        raise _unknown(value, where, wanted, forms[0].kinds if forms else ())
    try:
        record = form.read(value)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    if type(record) not in wanted:
        raise _unknown(value, where, wanted, (type(record),))
    return replace(record, where=where)


def _unknown(
    value: Mapping[str, Any], where: str, wanted: Sequence[type[Record]], kinds: Sequence[type[Record]]
) -> DataError:
    """What is there, and what was asked for."""
    usable = [form for form in FORMS if {*form.kinds} & {*wanted}]
    known = sorted({key for form in usable for key in form.keys})
    hint = next((h for key in value if key not in known and (h := did_you_mean(key, known))), "")
    asked = "; ".join(", ".join(form.keys) for form in usable)
    names = " or ".join(kind.__name__ for kind in wanted)
    there = " or ".join(sorted(kind.__name__ for kind in kinds)) or "of no known kind"
    return DataError(
        f"{where}: this record is {there}, with the keys {sorted(value)}{hint}; asked for {names}, whose keys are: "
        f"{asked}"
    )


def _check_strings(value: Any, where: str) -> None:
    """Every string is text that UTF-8 can hold."""
    if isinstance(value, str):
        values.checked(value, where)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_strings(inner, where)
