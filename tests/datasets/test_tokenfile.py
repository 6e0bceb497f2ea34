"""Token files: the ids that are written are read back, and only complete files get their name."""

import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.data import TokenFile, TokenFileWriter
from headway.errors import DataError


def token_file(path: Path, documents: list[list[int]], vocab: int = 100) -> TokenFile:
    with TokenFileWriter(path, vocab) as writer:
        for document in documents:
            writer.add(document)
    return TokenFile(path)


@given(
    st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=9),
    st.sampled_from([100, 1 << 16, (1 << 16) + 1, 1 << 32]),
)
def test_documents_come_back(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocab: int
) -> None:
    file = token_file(tmp_path_factory.mktemp("t") / "x.tokens", documents, vocab)
    assert [file.document(i).tolist() for i in range(file.documents)] == documents
    assert file.tokens.tolist() == [i for d in documents for i in d]
    assert file.tokens.dtype == (np.uint16 if vocab <= 1 << 16 else np.uint32)
    assert (len(file), file.vocab) == (sum(map(len, documents)), vocab)


def test_the_largest_ids_fit(tmp_path: Path) -> None:
    assert token_file(tmp_path / "a", [[65535]], 1 << 16).tokens[0] == 65535
    assert token_file(tmp_path / "b", [[(1 << 32) - 1]], 1 << 32).tokens[0] == (1 << 32) - 1


def test_the_map_is_not_the_memory(tmp_path: Path) -> None:
    assert isinstance(token_file(tmp_path / "x", [[1, 2]]).tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        TokenFile(tmp_path / "x").tokens[0] = 3


def test_empty_documents_leave_no_trace(tmp_path: Path) -> None:
    file = token_file(tmp_path / "x", [[], [1], [], [2, 3], []])
    assert [file.document(i).tolist() for i in range(file.documents)] == [[1], [2, 3]]
    with pytest.raises(DataError, match="no document 2; documents are numbered from 0 to 1"):
        file.document(2)


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    token_file(tmp_path / "x", [[1, 2, 3]])
    with pytest.raises(DataError, match="token id 500"), TokenFileWriter(tmp_path / "x", 100) as writer:
        writer.add([4, 500])
    with pytest.raises(DataError, match="no tokens; the corpus is empty"), TokenFileWriter(tmp_path / "x", 9):
        pass
    with pytest.raises(DataError, match="token id 100 in document 1 is outside the vocabulary of 100"):
        token_file(tmp_path / "x", [[1], [100]])
    with pytest.raises(DataError, match="token id -1 in document 0"):
        token_file(tmp_path / "x", [[-1]])
    assert TokenFile(tmp_path / "x").tokens.tolist() == [1, 2, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    token_file(tmp_path / "x", [[1, 2, 3], [4]])
    content = (tmp_path / "x").read_bytes()
    for n in range(len(content)):
        (tmp_path / "x").write_bytes(content[:n])
        with pytest.raises(DataError, match=r"not a token file of headway|the file is cut off"):
            TokenFile(tmp_path / "x")


def test_files_that_are_something_else(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such token file \(it is a folder\)"):
        TokenFile(tmp_path)
    with pytest.raises(DataError, match="this is a folder; a token file needs a file name"):
        TokenFileWriter(tmp_path, 10)
    token_file(tmp_path / "x", [[1]])
    content = bytearray((tmp_path / "x").read_bytes())
    content[8] = 9
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataError, match="token file version 9; this headway reads version 1"):
        TokenFile(tmp_path / "x")


def test_another_tokenizer(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "x", 10, fingerprint=b"a" * 32) as writer:
        writer.add([1])
    TokenFile(tmp_path / "x").require_tokenizer(b"a" * 32)
    with pytest.raises(DataError, match="made by another tokenizer"):
        TokenFile(tmp_path / "x").require_tokenizer(b"b" * 32)


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace"])
def test_a_disk_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    token_file(tmp_path / "x", [[1, 2, 3]])
    with monkeypatch.context() as patch:
        patch.setattr(step, fail)
        with pytest.raises(DataError, match="x: could not be written: No space left"):
            token_file(tmp_path / "x", [[4]])
    assert TokenFile(tmp_path / "x").tokens.tolist() == [1, 2, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_disk_that_is_full_is_said_with_the_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(DataError, match=r"t\.tokens: could not be written: File too large"):
            token_file(tmp_path / "t.tokens", [[*range(100)]] * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*tmp_path.iterdir()] == []
