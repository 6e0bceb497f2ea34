"""`headway tokenize`: pieces, ids and offsets are those of the library."""

import json
from pathlib import Path

import pytest

from headway.cli import run
from headway.text import Tokenizer

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "猫"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES), encoding="utf-8")
    return tmp_path


def test_a_pair_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tokenize", str(folder), "The cats", "--pair", "猫", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = report["tokens"]
    (pair,) = Tokenizer.load(folder).inputs([("The cats", "猫")])
    assert [row["id"] for row in rows] == pair.ids
    assert [row["type"] for row in rows] == pair.token_types
    assert [row["covers"] for row in rows] == [None, "The", "cat", "s", None, "猫", None]
    assert report["characters"] == 9


def test_the_table_names_every_piece(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tokenize", str(folder), "cats [MASK]"]) == 0
    out = capsys.readouterr().out
    assert all(piece in out for piece in ("[CLS]", "cat", "##s", "[SEP]", "3:4"))
    assert "[MASK]" not in out
    assert out.endswith("7 tokens, 11 characters\n")
    assert run(["tokenize", str(folder), "cats [MASK]", "--special"]) == 0
    assert "[MASK]" in capsys.readouterr().out


def test_a_folder_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tokenize", str(tmp_path), "a"]) == 1
    assert "no tokenizer in this folder" in capsys.readouterr().err
