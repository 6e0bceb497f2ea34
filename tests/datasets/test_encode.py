"""A corpus of text as ids: each document has the ids it has alone, and memory does not grow with the corpus."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.data import Piece, TokenFile, encode_corpus, read_text
from headway.errors import DataError
from headway.text import train_bpe
from tests.text.conftest import CORPUS, byte_level

TOKENIZER = byte_level()


def test_documents_begin_with_bos_and_end_with_eos(tmp_path: Path) -> None:
    for i, text in enumerate(CORPUS):
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    file = encode_corpus(tmp_path, TOKENIZER, tmp_path / "x")
    assert file.path == tmp_path / "x"
    expected = [[*TOKENIZER.encode(text), TOKENIZER.eos] for text in CORPUS]
    assert [file.document(i).tolist() for i in range(file.documents)] == expected
    assert file.text_bytes == sum(len(t.encode()) for t in CORPUS)
    file.require_tokenizer(TOKENIZER.fingerprint)
    bare = encode_corpus(tmp_path, TOKENIZER, tmp_path / "y", bos=False, eos=False)
    assert len(bare) == len(file) - 2 * file.documents


def test_a_document_in_pieces_has_the_ids_of_the_whole(tmp_path: Path) -> None:
    text = "".join(CORPUS) * 3
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    pieces = list(read_text(tmp_path / "x.txt", piece=16))
    assert len(pieces) > 5
    encode_corpus(pieces, TOKENIZER, tmp_path / "x")
    assert TokenFile(tmp_path / "x").tokens.tolist() == [*TOKENIZER.encode(text), TOKENIZER.eos]


SPACED = train_bpe(["a\n\n  b\n \n\n a  \n\n\n b"] * 3, 265)


@given(st.text("ab \n", min_size=1, max_size=60).filter(lambda text: not text.isspace()))
def test_no_cut_falls_where_white_space_would_be_joined(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    file = tmp_path_factory.mktemp("t") / "x.txt"
    file.write_text(text)
    encode_corpus(read_text(file, piece=4), SPACED, file.with_suffix(".tokens"), eos=False)
    # a text without a place to cut is cut after 16 pieces, which are longer than this text
    assert TokenFile(file.with_suffix(".tokens")).tokens.tolist() == SPACED.encode(text)


def test_control_tokens_in_the_corpus_are_text(tmp_path: Path) -> None:
    encode_corpus([Piece("a<|end|>b", True, "x:1")], TOKENIZER, tmp_path / "x")
    assert TokenFile(tmp_path / "x").tokens.tolist().count(TOKENIZER.eos or 1) == 1


def test_a_bad_line_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    with pytest.raises(DataError, match=r"x\.jsonl:2"):
        encode_corpus(tmp_path / "x.jsonl", TOKENIZER, tmp_path / "out")
    with pytest.raises(DataError, match="no text; every document of the corpus is empty"):
        encode_corpus([Piece("", True, "x:1")], TOKENIZER, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """After 8 MB of text, 24 MB in one file raise the peak by less than half of their size."""
    line = "the cat sat on the mat and the dog sat on the log\n"
    for megabytes in (8, 24):
        (tmp_path / f"{megabytes}.txt").write_text(line * (megabytes * (1 << 20) // len(line)))
    code = (
        "import resource; from headway.data import encode_corpus; from tests.text.conftest import byte_level\n"
        "for n in (8, 24):\n"
        f"    encode_corpus(f'{tmp_path}/{{n}}.txt', byte_level(), '{tmp_path}/out')\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    root = Path(__file__).parents[2]
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=root)
    before, after = map(int, completed.stdout.split())
    assert after - before < 12 * 1024  # kB
