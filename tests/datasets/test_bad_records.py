"""Records that cannot be read are errors that name the file and the line."""

import gzip
from pathlib import Path

import pytest

from headway.data.records import read_records
from headway.errors import DataError

LINES = [
    ('{"text": "a", "label": 1}\n{"text": 1, "label": 1}', r'x\.jsonl:2: "text" must be a string, got int'),
    ('\n{"txet": "a"}', r'x\.jsonl:2: this record is of no known kind, .*\[\'txet\'\] \(did you mean "text"\?\)'),
    ("[1]", r"x\.jsonl:1: the line begins a JSON array, but JSONL has one object per line"),
    ('{"text": "a"} {}', r"x\.jsonl:1: not JSON: Extra data at column 15"),
    ('{"text": "a",}', r"x\.jsonl:1: not JSON: .* at column"),
    ('{"text": "\\ud800"}', r"x\.jsonl:1: a lone surrogate U\+D800"),
    ('{"text": "a\\u0000"}', r"x\.jsonl:1: a NUL character"),
    ("3", r"x\.jsonl:1: an object is expected, got int"),
    ("\n\n", r"x\.jsonl: no records"),
    ('{"messages": []}', r'x\.jsonl:1: "messages": a chat needs at least one message'),
    ('{"messages": [{"role": "user", "contnet": "a"}]}', r'message 0 \(user\) needs "content".*did you mean'),
    ('{"messages": [{"role": "user", "content": 3}]}', r'messages\[0\]: "content" must be a string or a list, got int'),
    ('{"messages": [{"role": "user", "content": null}]}', r'messages\[0\]: "content" must be a string'),
    ('{"messages": [{"role": "a", "content": "", "weight": 2}]}', r'"weight" must be 0 or 1, got 2'),
    ('{"conversations": [{"from": "humna", "value": ""}]}', r"conversations\[0\]: there is no speaker 'humna'"),
    ('{"conversations": [{"from": "gpt"}]}', r'conversations\[0\] needs "from" and a string "value"'),
    ('{"conversations": [{"from": "function_call", "value": "f()"}]}', r"a function_call must be JSON"),
    ('{"conversations": []}', r'"conversations" must be a non-empty list of turns'),
    ('{"instruction": 3, "output": ""}', r'x\.jsonl:1: "instruction" must be a string, got int'),
    ('{"instruction": "", "output": "", "history": [3]}', r"history\[0\] must be a list of a question"),
    ('{"prompt": "p", "completion": ""}', r'"completion" is empty'),
    ('{"chosen": "a", "rejected": "b"}', r"the record has no prompt"),
    ('{"prompt": "a", "chosen": [{"role": "user", "content": ""}], "rejected": "b"}', r'"chosen" must continue'),
    ('{"text": "a", "label": 0.5}', r'"label" must be a non-empty string, a whole number or a boolean, got 0\.5'),
    ('{"text": "a", "label": null}', r'"label" must be a non-empty string, a whole number or a boolean, got None'),
    ('{"tokens": ["a"], "tags": []}', r"1 words and 0 tags"),
    ('{"tokens": "a", "tags": []}', r'"tokens" must be a list, got str'),
    ('{"A": "", "B": "", "C": "", "label": "A"}', r'"label" must be "B" or "C".*got \'A\''),
    ('{"question": "", "context": "a", "answers": [{"text": "a", "answer_start": -2}]}', r"not at character -2"),
    ('{"question": "", "context": "a", "answers": [{"text": "", "answer_start": 0}]}', r"needs a non-empty string"),
    ('{"question": "", "context": "a", "answers": [{"text": "a"}]}', r'answers\[0\] needs a non-empty string "text"'),
    ('{"question": "", "context": "a", "answers": {"text": ["a"], "answer_start": []}}', r"lists .* of equal length"),
]  # fmt: skip
BAD = [
    ("x.json", "[]", r"x\.json: no records"),
    ("x.json", '[\n{"text": "a"}\n{"text": "b"}]', r"x\.json:3: not JSON: Expecting ',' delimiter at column 1"),
    ("x.json", '[\n{"text": "a"},\n{"text":\n oops}]', r"x\.json:4: not JSON: .* at column 2"),
    ("x.json", '[{"text": "a", "label": 1}, {"text": 1, "label": 1}]', r'x\.json: \[1\]: "text" must be a string'),
    ("x.json", '{"text": "a", "label": 1}\n{"text": 1, "label": 1}', r'x\.json:2: "text" must be a string, got int'),
    ("x.json", '"text"', r"x\.json: expected an object or an array of objects, got"),
    ("x.json", '{"data": [{"paragraphs": [3]}]}', r'paragraphs\[0\]: SQuAD has a list "qas" here, got int'),
    ("x.csv", "text,label\na,b\nc\n", r"x\.csv:3: 1 cells; the first line names 2"),
    ("x.csv", 'text,label\n"a,b\n', r"x\.csv:2: not CSV: unexpected end of data"),
    ("x.conll", "a O\nb\n", r"x\.conll:2: a word and its tag are expected, got 'b'"),
    ("x.parquet", "PAR1", r"records are read from \.jsonl, \.json, .*, not '\.parquet'"),
    *(("x.jsonl", content, error) for content, error in LINES),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "error"), BAD)
def test_what_cannot_be_read_is_named_by_file_and_line(
    tmp_path: Path, name: str, content: str, error: str
) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(DataError, match=error) as raised:
        list(read_records(file))
    assert str(raised.value).startswith(str(file))


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(b'{"text": "\xff"}')
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b"[]" * 1000)[:-9])
    for name, error in (
        ("tran.jsonl", r'no such file \(did you mean "train\.jsonl"\?\)'),
        ("", "a folder; records are read from files"),
        ("train.jsonl", r"train\.jsonl:1: not UTF-8 at byte 10 of the line"),
        ("cut.json.gz", "a broken gzip file"),
    ):
        with pytest.raises(DataError, match=error):
            list(read_records(tmp_path / name))
