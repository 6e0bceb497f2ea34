"""Reading text: each document once, and errors that name the file, the line and the cause."""

import gzip
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.data import read_text, texts
from headway.errors import DataError


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "z.txt", b"third")
    write(tmp_path / "a.txt", b"first")
    write(tmp_path / "a.jsonl", b'{"text": "zeroth"}\n')
    write(tmp_path / "notes.md", b"not this one")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"fourth", mtime=0))
    assert list(texts(tmp_path)) == ["zeroth", "first", "third", "fourth"]
    assert [p.ends for p in read_text(tmp_path)] == [True] * 4


def test_jsonl(tmp_path: Path) -> None:
    lines = [{"text": "a\nb", "id": 1}, {"text": ""}, {"text": "猫🙂"}]
    plain = "\r\n".join(json.dumps(line) for line in lines) + "\r\n\r\n"
    for name, content in (("x.jsonl", plain.encode()), ("y.jsonl.gz", gzip.compress(plain.encode()))):
        assert list(texts(write(tmp_path / name, content))) == ["a\nb", "", "猫🙂"]
    bom = write(tmp_path / "bom.jsonl", b"\xef\xbb\xbf" + plain.encode())
    assert list(texts(bom)) == ["a\nb", "", "猫🙂"]
    body = write(tmp_path / "k.jsonl", b'{"body": "x"}')
    assert list(texts(body, key="body")) == ["x"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.json", '[{"text": "a\\nb"},\n {"text": "c"}]'),
        ("x.json", '{"data": [{"text": "a\\nb"}, {"text": "c"}]}'),
        ("x.csv", 'id,text\n1,"a\nb"\n2,c\n'),
        ("x.tsv", "text\tid\na b\t1\nc\t2\n"),
    ],
)
def test_records_are_read_as_records_whatever_the_file_is_called(
    tmp_path: Path, name: str, content: str
) -> None:
    """Their texts are read, not the source of the file."""
    expected = ["a b" if name == "x.tsv" else "a\nb", "c"]
    for path, stored in ((name, content.encode()), (f"{name}.gz", gzip.compress(content.encode(), mtime=0))):
        file = write(tmp_path / path, stored)
        assert list(texts(file)) == expected
        assert all(piece.ends for piece in read_text(file))


def test_text_keeps_its_line_ends_and_loses_its_bom(tmp_path: Path) -> None:
    assert list(texts(write(tmp_path / "x.txt", b"\xef\xbb\xbfa\r\nb\n\xef\xbb\xbf"))) == ["a\r\nb\n\ufeff"]


@given(st.text(st.sampled_from("ab \n猫🙂"), min_size=1, max_size=80), st.integers(1, 12))
def test_a_long_text_in_pieces_is_the_text(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int
) -> None:
    file = write(tmp_path_factory.mktemp("t") / "x.txt", text.encode())
    pieces = list(read_text(file, piece=size))
    assert "".join(p.text for p in pieces) == text
    assert [p.ends for p in pieces] == [False] * (len(pieces) - 1) + [True]
    line = 1
    for piece in pieces:
        assert piece.where == f"{file}:{line}"
        line += piece.text.count("\n")


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"text": \n', r"x.jsonl:2: not JSON: .* column"),
        ("x.jsonl", b'[\n{"text": "a"},\n{"text": "b"}\n]', r"x.jsonl:1: the line begins a JSON array"),
        ("x.jsonl", b'{"text": "a"}\n\n{"txet": "a", "n": 1}', r"x.jsonl:3: no key 'text' \(did you mean \"txet\""),
        ("x.jsonl", b'{"text": ["a"]}', r"x.jsonl:1: \"text\" must be a string, got list"),
        ("x.jsonl", b'"text"', r"x.jsonl:1: an object with \"text\" is expected, got str"),
        ("x.jsonl", b'{"text": "a\\ud800b"}', r"x.jsonl:1: a lone surrogate U\+D800"),
        ("x.jsonl", b'{"text": "a\\u0000b"}', r"x.jsonl:1: a NUL character"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xff"}', r"x.jsonl:2: not UTF-8 at byte 10"),
        ("x.jsonl", b"\n\n", r"x.jsonl: no records"),
        ("x.jsonl", b"", r"x.jsonl: the file is empty"),
        ("x.txt", b"", r"x.txt: the file is empty"),
        ("x.txt", b"\xef\xbb\xbf", r"x.txt: the file is empty"),
        ("x.txt", b"a\nb\0c", r"x.txt:1: a NUL character, 1 lines further on"),
        ("x.txt", b"abc\xff", r"x.txt: not UTF-8 near byte 3"),
        ("x.txt", b"abc\xe7\x8c", r"x.txt: not UTF-8 at its end"),
        ("x.txt.gz", b"not gzip", r"x.txt.gz: a broken gzip file"),
        ("x.txt.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 99, r"x.txt.gz: a broken gzip file: .*invalid"),
        ("x.csv", b"\xef\xbb\xbf", r"x.csv: no records"),
        ("x.txt.gz", gzip.compress(b"text " * 99, mtime=0)[:-9], r"x.txt.gz: a broken gzip file"),
        ("x.json", b"[]", r"x.json: no records"),
        ("x.json.gz", gzip.compress(b'[{"txt": "a"}]', mtime=0), r"x.json.gz: \[0\]: no key 'text'"),
        ("x.csv", b"body,label\na,1\n", r"x.csv:2: no key 'text'.*this object has body, label"),
        ("x.conll", b"a O\n", r"x.conll:1: no key 'text'.*this object has tokens, tags"),
        ("x.md", b"# a", r"x.md: this file is Markdown, which is not read as text; convert it to .txt"),
        ("x.html.gz", gzip.compress(b"<p>", mtime=0), r"x.html.gz: this file is HTML"),
    ],
)  # fmt: skip
def test_what_is_not_text(tmp_path: Path, name: str, content: bytes, match: str) -> None:
    with pytest.raises(DataError, match=match):
        list(read_text(write(tmp_path / name, content)))


@pytest.mark.parametrize(
    ("ending", "kind"),
    [
        ("md", "Markdown"), ("rst", "reStructuredText"), ("html", "HTML"), ("htm", "HTML"), ("xml", "XML"),
        ("tex", "TeX"), ("pdf", "PDF"), ("docx", "a Word document"), ("epub", "an e-book"), ("ipynb", "a notebook"),
        ("parquet", "Parquet"), ("arrow", "Arrow"), ("zip", "an archive"), ("tar", "an archive"),
        ("tgz", "an archive"),
    ],
)  # fmt: skip
def test_every_form_that_is_no_plain_text_has_its_name(tmp_path: Path, ending: str, kind: str) -> None:
    with pytest.raises(DataError) as caught:
        list(read_text(write(tmp_path / f"x.{ending}", b"abc")))
    assert str(caught.value) == (
        f"{tmp_path / 'x'}.{ending}: this file is {kind}, which is not read as text; convert it to .txt, or to "
        '.jsonl with a "text" on each line; to use the markup itself as text, rename it to .txt'
    )


def test_paths_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no .txt or .jsonl file in this folder \(it holds: nothing\)"):
        list(read_text(tmp_path))
    write(tmp_path / "corpus.txt", b"x")
    with pytest.raises(DataError, match=r"no such file or folder \(did you mean \"corpus.txt\"\?\)"):
        list(read_text(tmp_path / "corpsu.txt"))


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b'{"text": "a"}\r\n{"text": "b"}\r\n{"txt": "c"}\r\n', r"x.jsonl:3: no key 'text' \(did you mean \"txt\""),
        (b'\xef\xbb\xbf{"text": "a"}\n{"text": 1}\n', r"x.jsonl:2: \"text\" must be a string, got int"),
        (b'{"text": "a"}\n\xef\xbb\xbf{"text": "b"}\n', r"x.jsonl:2: not JSON: Unexpected UTF-8 BOM"),
        (b'{"text": "a"} {"text": "b"}', r"x.jsonl:1: not JSON: Extra data"),
        (b'{"text": "a"}\r{"text": "b"}\r', r"x.jsonl:1: not JSON: Extra data"),
        (b'{"text": null}', r"x.jsonl:1: \"text\" must be a string, got NoneType"),
        (b'{"text": "a"}\n{}', r"x.jsonl:2: no key 'text'.*this object has none"),
        (b'{"text": "a"}\nNaN\n', r"x.jsonl:2: an object with \"text\" is expected, got float"),
        (b'\n {"text": "a"}\n [1]\n', r"x.jsonl:3: the line begins a JSON array"),
        (b'{"text": "\xed\xa0\x80"}', r"x.jsonl:1: not UTF-8 at byte 10"),
        (b'{"text": "a\0b"}', r"x.jsonl:1: a NUL character"),
        ('{"text": "a"}'.encode("utf-16"), r"x.jsonl:1: not UTF-8 at byte 0"),
        (b'{"text": "a"}\n{"text": "a", "n": ' + b"1" * 5000 + b"}", r"x.jsonl:2: JSON beyond Python's limits: .*4300"),
        (b'{"text": "a"}\n' + b'{"a": ' * 100_000, r"x.jsonl:2: JSON beyond Python's limits: .*recursion"),
    ],
    ids=range(14),
)  # fmt: skip
def test_a_bad_line_is_named_by_its_number_whatever_ends_lines(
    tmp_path: Path, content: bytes, match: str
) -> None:
    for name, stored in (("x.jsonl", content), ("x.jsonl.gz", gzip.compress(content, mtime=0))):
        with pytest.raises(DataError, match=match.replace("x.jsonl", re.escape(name))):
            list(texts(write(tmp_path / name, stored)))


def test_text_of_other_encodings_is_named(tmp_path: Path) -> None:
    for content in ("text".encode("utf-16"), b"a\xed\xa0\x80b", "naïve".encode("latin-1")):
        with pytest.raises(DataError, match=r"x.txt: not UTF-8 near byte \d; is this text\?"):
            list(texts(write(tmp_path / "x.txt", content)))


def test_line_separators_inside_a_string_end_no_line(tmp_path: Path) -> None:
    content = '{"text": "a\u2028b\u0085c"}\n{"text": "d"}'.encode()
    assert list(texts(write(tmp_path / "x.jsonl", content))) == ["a\u2028b\u0085c", "d"]


def test_a_folder_by_the_name_of_a_file_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(
        DataError, match=r"x.jsonl: no .txt or .jsonl file in this folder \(it holds: nothing\)"
    ):
        list(texts(tmp_path / "x.jsonl"))
    write(tmp_path / "x.jsonl" / "a.txt", b"inside")
    assert list(texts(tmp_path / "x.jsonl")) == ["inside"]
