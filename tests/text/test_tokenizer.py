"""Text to ids and back: the laws of a tokenizer, with `transformers` as the oracle."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from headway.errors import CheckpointError, ConfigError, DataError
from headway.text import Tokenizer, train_bpe
from tests.text.conftest import CORPUS, byte_level, sentencepiece

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
BYTE_LEVEL, LLAMA = byte_level(), sentencepiece()


@given(TEXT)
def test_byte_level_text_comes_back(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text


@given(TEXT)
def test_sentencepiece_text_comes_back(text: str) -> None:
    text = text.replace("▁", "_")  # SentencePiece's visible space cannot be told from a space
    assert LLAMA.decode(LLAMA.encode(text)) == text


@given(TEXT)
def test_decoding_valid_text_is_the_library_s_decoding(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, LLAMA):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer.backend.decode(ids, skip_special_tokens=True)


def test_bos_stands_once_unless_it_is_written_twice_which_is_warned_of() -> None:
    """`test_folders.py` has BOS of published tokenizers."""
    the = BYTE_LEVEL.encode("the", bos=False)
    assert (
        BYTE_LEVEL.encode("the") == BYTE_LEVEL.encode(BYTE_LEVEL.token(0) + "the", special=True) == [0, *the]
    )
    with pytest.warns(UserWarning, match="begin with BOS .* twice"):
        assert BYTE_LEVEL.encode(BYTE_LEVEL.token(0) * 2, special=True) == [0, 0]


def test_special_tokens_in_text_are_text_unless_asked_for() -> None:
    for tokenizer in (BYTE_LEVEL, LLAMA):
        for i in tokenizer.special_ids:
            text = f"the {tokenizer.token(i)} cat"
            assert not tokenizer.special_ids & set(tokenizer.encode(text, bos=False))
            assert tokenizer.decode(tokenizer.encode(text)) == text
            assert tokenizer.encode(text, bos=False, special=True).count(i) == 1


def test_byte_pieces_cannot_be_typed() -> None:
    assert LLAMA.decode(LLAMA.encode("<0x41>")) == "<0x41>"


def test_training_is_a_function_of_the_texts() -> None:
    once, again = train_bpe(CORPUS, 320), train_bpe(reversed(CORPUS), 320)
    assert once.backend.to_str() == again.backend.to_str()
    assert once.fingerprint == again.fingerprint != train_bpe(CORPUS[:2], 300).fingerprint


@pytest.mark.slow
def test_training_does_not_depend_on_threads() -> None:
    code = (
        "from tests.text.conftest import byte_level as b; import sys; sys.stdout.write(b().backend.to_str())"
    )
    outs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"RAYON_NUM_THREADS": n, "TOKENIZERS_PARALLELISM": "true"},
            capture_output=True, check=True, cwd=Path(__file__).parents[2],
        ).stdout
        for n in "124"
    }  # fmt: skip
    assert len(outs) == 1


def test_training_refuses_what_has_no_room_and_says_when_it_falls_short() -> None:
    with pytest.raises(ConfigError, match=r"vocab_size 200 is too small: 2 special .* need 258"):
        train_bpe(["a"], 200)
    with pytest.raises(ConfigError, match="must differ from each other"):
        train_bpe(["a"], 300, special_tokens=["<x>", "<x>"])
    with pytest.warns(UserWarning, match="the texts gave 260 tokens, not 300"):
        assert train_bpe(["ab ab"], 300).vocab_size == 260


def test_a_trained_tokenizer_shortens_its_corpus() -> None:
    text = CORPUS[0]
    assert len(BYTE_LEVEL.encode(text)) < len(text) / 1.5


def test_a_tokenizer_larger_than_the_embedding() -> None:
    BYTE_LEVEL.require_fits(330)
    with pytest.raises(
        CheckpointError, match=r"ids up to 329 \(330 tokens\) but the model's embedding has 329 rows"
    ):
        BYTE_LEVEL.require_fits(329)
    assert BYTE_LEVEL.unused_ids(333) == [330, 331, 332]


def test_ids_out_of_range() -> None:
    for bad in (-1, 330, 10**9):
        with pytest.raises(DataError, match=f"token id {bad} is not in the vocabulary of 330"):
            BYTE_LEVEL.decode([bad])


def test_text_that_is_none() -> None:
    with pytest.raises(DataError, match="text 1 must be a str, got NoneType"):
        BYTE_LEVEL.encode_batch(["a", None])  # type: ignore[list-item]
    with pytest.raises(DataError, match=r"text 0 has a lone surrogate \(U\+D800 at character 1\)"):
        BYTE_LEVEL.encode("a\ud800")
    with pytest.raises(DataError, match="text 0 must be a str, got int"):
        BYTE_LEVEL.encode_batch([("a", 1)])  # type: ignore[list-item]
    with pytest.raises(DataError, match="text 0 must be a str, or a pair of them, got a tuple of 3"):
        BYTE_LEVEL.encode_batch([("a", "b", "c")])  # type: ignore[list-item]
    with pytest.raises(DataError, match=r"text 1 has a lone surrogate"):
        BYTE_LEVEL.encode_batch([("a", "b"), ("c", "d\ud800")])
    assert BYTE_LEVEL.encode("") == [0]
    assert BYTE_LEVEL.encode("", bos=False) == []


def test_truncation_in_the_file_is_not_obeyed(tmp_path: Path) -> None:
    backend = Backend.from_str(BYTE_LEVEL.backend.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("the cat sat on the mat and on the log")) > 9


def test_save_and_load(tmp_path: Path) -> None:
    BYTE_LEVEL.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    text = "the cat 我们 🙂"
    assert again.encode(text) == BYTE_LEVEL.encode(text)
    assert (again.bos, again.eos, again.begins_with_bos) == (0, 1, True)
    assert again.fingerprint == BYTE_LEVEL.fingerprint
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_what_we_save_transformers_reads(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for tokenizer in (BYTE_LEVEL, LLAMA):
        tokenizer.save(tmp_path)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        for text in (*CORPUS, "", " x", "a  b"):
            assert theirs(text)["input_ids"] == tokenizer.encode(text)
        assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos, tokenizer.eos)


def test_what_files_say_about_bos(tmp_path: Path) -> None:
    BYTE_LEVEL.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": False}))
    assert Tokenizer.load(tmp_path).encode("the")[0] != 0
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": None}))
    assert Tokenizer.load(tmp_path).bos == 0  # the post-processor still says so
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"eos_token": {"content": "<|user|>"}})
    )
    assert Tokenizer.load(tmp_path).eos == 2
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<nowhere>"}))
    with pytest.raises(
        DataError, match=r"eos_token is '<nowhere>' in the configuration, but the tokenizer has no"
    ):
        Tokenizer.load(tmp_path)


def test_bare_tokenizer_json_takes_ids_from_the_model_s_config(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"a": 0, "<s>": 1, "</s>": 2}, []))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": [2, 0]}')
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.begins_with_bos) == (1, 2, False)
    assert tokenizer.special_ids == {1, 2}


def test_files_that_are_not_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(
        DataError,
        match=r"no tokenizer in this folder: expected one of tokenizer.json, .*vocab.bpe\), found nothing",
    ):
        Tokenizer.load(tmp_path)
    file = tmp_path / "tokenizer.json"
    for content, match in (
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        (b"<html>", "an HTML page"),
    ):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=match):
            Tokenizer.load(file)
    for name, content, match in (
        ("tokenizer.model", b"\x0a\xff\xff\xff", "not a SentencePiece model"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "254 of the 256 bytes have no rank"),
        ("tokenizer.bin", b"\0" * 40, "not a llama2.c tokenizer"),
    ):
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(DataError, match=match):
            Tokenizer.load(file)


@given(TEXT)
def test_text_to_ids_to_vectors_and_back(text: str) -> None:
    """Mission 34: word, id, vector; an id can be recovered from its vector, so the text comes back."""
    embedding = torch.nn.Embedding(BYTE_LEVEL.vocab_size, 16)
    ids = BYTE_LEVEL.encode(text)
    vectors = embedding(torch.tensor(ids)).detach()
    nearest = torch.cdist(
        vectors, embedding.weight.detach(), compute_mode="donot_use_mm_for_euclid_dist"
    ).argmin(1)
    assert BYTE_LEVEL.decode(nearest.tolist()) == text
