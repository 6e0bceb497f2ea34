"""Records: their keys decide their kind, in files of every form and in published files."""

import gzip
import json
import re
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.data.record_kinds import (
    Answer,
    Chat,
    Completion,
    Labelled,
    Preference,
    Question,
    Record,
    Tagged,
    Triplet,
)
from headway.data.records import read_records
from headway.data.values import values
from headway.errors import DataError
from tests.data import data_path

HI, YO, NO = (
    {"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "yo"), ("assistant", "no"))
)
SYSTEM = {"role": "system", "content": "s"}
CALL = {"name": "f", "arguments": {"x": 1}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}
CASES: list[tuple[dict[str, Any], Record]] = [
    ({"messages": [SYSTEM, HI, YO], "tools": [{"name": "f"}]}, Chat((SYSTEM, HI, YO), [{"name": "f"}])),
    ({"messages": [HI, {**YO, "weight": 0}, HI, YO]}, Chat((HI, {**YO, "weight": 0}, HI, YO))),
    ({"conversations": [HUMAN, GPT], "system": "s", "tools": "[1]"}, Chat((SYSTEM, HI, YO), [1])),
    ({"conversations": [HI, YO]}, Chat((HI, YO))),
    (
        {"conversations": [HUMAN, {"from": "function_call", "value": json.dumps(CALL)},
                           {"from": "observation", "value": "o"}, GPT]},
        Chat((HI, CALLED, {"role": "tool", "content": "o"}, YO)),
    ),
    (
        {"instruction": "i", "input": "n", "output": "yo", "history": [["hi", "no"]], "system": "s"},
        Chat((SYSTEM, HI, NO, {"role": "user", "content": "i\n\nn", "instruction": "i", "input": "n"}, YO)),
    ),
    (
        {"instruction": "hi", "output": "yo"},
        Chat(({**HI, "instruction": "hi", "input": ""}, YO)),
    ),
    ({"question": "hi", "answer": "yo"}, Chat((HI, YO))),
    ({"prompt": [HI, NO, HI], "completion": [YO]}, Chat((HI, {**NO, "weight": 0}, HI, YO))),
    ({"prompt": "p", "completion": " c"}, Completion("p", " c")),
    ({"prompt": "hi", "chosen": "yo", "rejected": "no"}, Preference((HI,), (YO,), (NO,))),
    ({"prompt": [HI], "chosen": [YO], "rejected": [NO]}, Preference((HI,), (YO,), (NO,))),
    ({"chosen": [HI, YO], "rejected": [HI, NO]}, Preference((HI,), (YO,), (NO,))),
    ({"prompt": "hi", "chosen": [HI, YO], "rejected": [HI, NO]}, Preference((HI,), (YO,), (NO,))),
    ({"chosen": [HI, YO], "rejected": [HI, YO, HI, NO]}, Preference((HI,), (YO,), (YO, HI, NO))),
    ({"chosen": [HI, YO, YO], "rejected": [HI, YO, NO]}, Preference((HI,), (YO, YO), (YO, NO))),
    (
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "no"}},
        Preference((HI,), (YO,), (NO,)),
    ),
    ({"text": "t", "label": 3}, Labelled("t", None, "3")),
    ({"sentence": "t", "label": True}, Labelled("t", None, "true")),
    ({"text_a": "t", "text_b": "u", "label": "x"}, Labelled("t", "u", "x")),
    ({"text": "t", "text_pair": "u", "label": "x"}, Labelled("t", "u", "x")),
    ({"sentence1": "t", "sentence2": "u", "label": "x"}, Labelled("t", "u", "x")),
    ({"premise": "t", "hypothesis": "u", "label": "x"}, Labelled("t", "u", "x")),
    ({"tokens": ["a", "b"], "ner_tags": [0, 5]}, Tagged(["a", "b"], ["0", "5"])),
    ({"words": ["a", "b"], "tags": ["O", "B-X"]}, Tagged(["a", "b"], ["O", "B-X"])),
    ({"A": "a", "B": "b", "C": "c", "label": "C"}, Triplet("a", "c", "b")),
    ({"anchor": "a", "positive": "p", "negative": "n"}, Triplet("a", "p", "n")),
    ({"query": "a", "positive": "p"}, Triplet("a", "p", None)),
    (
        {"question": "q", "context": "abab", "answers": {"text": ["ab"], "answer_start": [2]}, "id": "7"},
        Question("q", "abab", (Answer("ab", 2),)),
    ),
    (
        {"question": "q", "context": "abab", "answers": [{"text": "b", "answer_start": 3}], "id": "7"},
        Question("q", "abab", (Answer("b", 3),)),
    ),
    ({"question": "q", "context": "abab", "answers": [], "id": "7"}, Question("q", "abab", ())),
]  # fmt: skip


def one(record: Record) -> Record:
    """Returns the record without its place in a file."""
    return type(record)(**{**vars(record), "where": ""})


@pytest.mark.parametrize(
    ("row", "record"), CASES, ids=lambda case: ",".join(case) if isinstance(case, dict) else ""
)
def test_every_form_is_its_record(tmp_path: Path, row: dict[str, Any], record: Record) -> None:
    """In JSONL and arrays, compressed or not, with or without other keys; asking for another kind is an error."""
    array_places = [": [0]", ": [1]"]
    content = json.dumps(row | {"source_id": 1}).encode()
    array = b"[\n " + json.dumps({**row}, indent=1).encode() + b"\n,\n" + content + b"]\n"
    for name, written, places in (
        ("x.jsonl", b"\xef\xbb\xbf" + content + b"\r\n\r\n" + content, [":1", ":3"]),
        ("x.jsonl.gz", gzip.compress(content), [":1"]),
        ("y.json", content + b"\n" + content, [":1", ":2"]),
        ("x.json", array, array_places),
        ("x.json.gz", gzip.compress(array), array_places),
    ):
        file = tmp_path / name
        file.write_bytes(written)
        for kinds in ((), (type(record),), (type(record), Tagged)):
            records = list(read_records(file, *kinds))
            assert [r.where for r in records] == [f"{file}{place}" for place in places]
            assert [one(r) for r in records] == [record] * len(places)
    other = Triplet if not isinstance(record, Triplet) else Tagged
    message = rf"x\.jsonl:1: this record is .*{type(record).__name__}.*; expected {other.__name__}"
    with pytest.raises(DataError, match=message):
        list(read_records(tmp_path / "x.jsonl", other))


def test_the_kind_that_was_asked_for_decides_what_a_record_with_several_is(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    both = {"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d"}
    file.write_text(json.dumps(both))
    for kinds, expected in (
        ((), Preference),
        ((Completion,), Completion),
        ((Completion, Preference), Preference),
    ):
        assert [type(r) for r in read_records(file, *kinds)] == [expected]


def test_squad_is_a_question_after_the_other_with_its_context(tmp_path: Path) -> None:
    def qa(i: str, at: int) -> dict[str, Any]:
        return {"id": i, "question": "q" + i, "answers": [{"text": "b", "answer_start": at}]}

    file = tmp_path / "x.json"
    paragraphs = [
        {"context": "abab", "qas": [qa("1", 1), qa("2", 2), qa("3", 3)]},
        {"context": "b", "qas": [qa("4", 0)]},
    ]
    file.write_text(
        json.dumps({"version": "1", "data": [{"title": "t", "paragraphs": paragraphs}]}, indent=1)
    )
    errors: list[DataError] = []
    questions = list(read_records(file, Question, skipped=errors.append))
    assert [(q.question, q.context, q.answers) for q in questions if isinstance(q, Question)] == [
        ("q1", "abab", (("b", 1),)), ("q3", "abab", (("b", 3),)), ("q4", "b", (("b", 0),))
    ]  # fmt: skip
    place = "data[0].paragraphs[0].qas[1]: answers[0]"
    assert [str(e) for e in errors] == [f"{file}: {place}: 'b' is not at character 2 of the context; 'a' is"]
    with pytest.raises(DataError, match="is not at character"):
        list(read_records(file))


def test_tables_and_conll(tmp_path: Path) -> None:
    def read(name: str, text: str, *kinds: type[Record]) -> list[tuple[str, Record]]:
        (tmp_path / name).write_text(text)
        return [(r.where.removeprefix(f"{tmp_path}/"), one(r)) for r in read_records(tmp_path / name, *kinds)]

    assert read("x.csv", 'text,label\n"a, ""b""\nc",1\n\nd,2\n') == [
        ("x.csv:2", Labelled('a, "b"\nc', None, "1")), ("x.csv:5", Labelled("d", None, "2"))
    ]  # fmt: skip
    assert read("x.tsv", 'label\ttext_a\n1\t"a\n') == [("x.tsv:2", Labelled('"a', None, "1"))]
    assert read("x.txt", "a b\t1\n\nc\td\t2\n", Labelled) == [
        ("x.txt:1", Labelled("a b", None, "1")), ("x.txt:3", Labelled("c\td", None, "2"))
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"x\.txt: records are read from .*, not '\.txt'"):
        read("x.txt", "a b\t1\n", Chat)
    assert read("x.conll", "-DOCSTART- X O\n\na NN B-X\nb NN O\n\n\nc NN O") == [
        ("x.conll:3", Tagged(["a", "b"], ["B-X", "O"])), ("x.conll:7", Tagged(["c"], ["O"]))
    ]  # fmt: skip


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc\n]"), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(JSON, min_size=1, max_size=5), st.sampled_from([None, 0, 2]), st.integers(0, 200))
def test_an_array_is_its_elements(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], indent: int | None, cut: int
) -> None:
    """The elements are those that `json` reads; an array that is cut off anywhere is an error that names the file."""
    file = tmp_path_factory.mktemp("a") / "x.json"
    text = json.dumps(rows, indent=indent)
    file.write_text(text)
    assert list(values(file)) == [(f"{file}: [{i}]", row) for i, row in enumerate(rows)]
    file.write_text(text[: cut % len(text)])
    with pytest.raises(DataError, match=re.escape(str(file))):
        list(values(file))


KEYS = sorted({key for row, _ in CASES for key in row})


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=5))
def test_whatever_stands_under_its_keys_a_record_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, row: dict[str, Any]
) -> None:
    file = tmp_path_factory.mktemp("r") / "x.jsonl"
    file.write_text(json.dumps(row))
    errors: list[DataError] = []
    records = list(read_records(file, skipped=errors.append))
    assert len(records) + len(errors) == 1
    assert all(str(error).startswith(f"{file}:1") for error in errors)


def counted(file: Path, *kinds: type[Record]) -> tuple[Counter[type[Record]], int]:
    errors: list[DataError] = []
    return Counter(type(r) for r in read_records(file, *kinds, skipped=errors.append)), len(errors)


@pytest.mark.parametrize(
    ("name", "kind", "read", "bad"),
    [
        ("alpaca/alpaca_5000.json.gz", Chat, 5000, 0),
        ("alpaca/alpaca_gpt4_zh_1000.json.gz", Chat, 1000, 0),
        ("alpaca/code_alpaca_2k.json.gz", Chat, 2017, 0),
        ("conversations/dummy_conversation_with_system.json", Chat, 500, 0),
        ("conversations/glaive_toolcall_en_sharegpt.json.gz", Chat, 300, 0),
        ("conversations/oasst1_sft_zh.json.gz", Chat, 766, 0),
        ("instruct-other/gsm8k_test.jsonl.gz", Chat, 1319, 0),
        ("chinese/cmrc2018_dev.json.gz", Question, 3216, 3),  # answers that stand elsewhere; start -1 is kept
        ("chinese/cmrc2018_trial.json.gz", Question, 997, 5),
        ("chinese/thucnews10_titles_dev.txt.gz", Labelled, 10000, 0),
    ],
)
def test_real_files(name: str, kind: type[Record], read: int, bad: int) -> None:
    assert counted(data_path(name), kind) == ({kind: read}, bad)


@pytest.mark.slow
def test_real_files_of_classes(tmp_path: Path) -> None:
    """IMDB and sets of FewCLUE have the counts of its README."""
    assert counted(data_path("imdb/test.jsonl.gz")) == ({Labelled: 25000}, 0)
    with tarfile.open(data_path("chinese/fewclue_labelled.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    sizes = {
        "tnews": 2010,
        "iflytek": 1749,
        "ocnli": 2520,
        "bustm": 1772,
        "eprstmt": 610,
    }
    for name, size in sizes.items():
        assert counted(tmp_path / "datasets" / name / "test_public.json") == ({Labelled: size}, 0)
