"""The vocabularies in llama.cpp's sources give the ids in the files beside them, and again as Hugging Face folders."""

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from headway.errors import DataError
from headway.text import Tokenizer
from tests.data import llama_cpp_path

QUICK = ["bert-bge", "gpt-2", "llama-spm"]
SLOW = [
    "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "llama-bpe", "mpt", "phi-3", "qwen2", "qwen35",
    "refact", "starcoder",
]  # fmt: skip
WITHOUT_IDS = ["baichuan", "nomic-bert-moe"]
REFUSED = {
    "aquila": "tokenizer.ggml.pre, the name of the pre-tokenizer, is missing",
    "gpt-neox": "tokenizer.ggml.pre, the name of the pre-tokenizer, is missing",
}
"""Written before files named the rule by which they split text."""
BETWEEN = "\n__ggml_vocab_test__\n"


def vocabulary(name: str) -> Path:
    return llama_cpp_path(f"models/ggml-vocab-{name}.gguf")


def texts_of(name: str) -> list[str]:
    return Path(f"{vocabulary(name)}.inp").read_bytes().decode().removesuffix(BETWEEN).split(BETWEEN)


def as_folders(tokenizer: Tokenizer, folder: Path) -> tuple[Tokenizer, Any]:
    """Returns the tokenizer as its saved folder is read, here and by transformers."""
    from transformers import AutoTokenizer

    tokenizer.save(folder)
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_published_vocabulary_gives_its_ids(name: str, tmp_path: Path) -> None:
    """llama.cpp does not compose characters (NFC) as Qwen's own tokenizers do; its ids are those without that step."""
    rows = [
        [int(token) for token in line.split()]
        for line in Path(f"{vocabulary(name)}.out").read_text().splitlines()
    ]
    tokenizer = Tokenizer.load(vocabulary(name))
    again, theirs = as_folders(tokenizer, tmp_path)
    backend = Backend.from_str(tokenizer.backend.to_str())
    composes = "NFC" in repr(backend.normalizer)
    if composes:
        backend.normalizer = None  # type: ignore[assignment]
    uncomposed = Tokenizer(backend)
    for text, ids in zip(texts_of(name), rows, strict=True):
        if composes and text != unicodedata.normalize("NFC", text):
            assert uncomposed.encode(text, bos=False, eos=False) == ids
            ids = uncomposed.encode(unicodedata.normalize("NFC", text), bos=False, eos=False)
        assert tokenizer.encode(text, bos=False, eos=False) == ids
        assert again.encode(text, bos=False, eos=False) == ids
        assert theirs.encode(text, add_special_tokens=False) == ids


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_IDS)
def test_a_published_vocabulary_without_ids_is_the_same_as_a_folder(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(vocabulary(name))
    again, theirs = as_folders(tokenizer, tmp_path)
    for text in texts_of("gpt-2"):
        ids = tokenizer.encode(text, bos=False, eos=False)
        assert again.encode(text, bos=False, eos=False) == ids
        assert theirs.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_vocabulary_without_a_rule_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=REFUSED[name]):
        Tokenizer.load(vocabulary(name))


def test_no_published_vocabulary_is_left_out() -> None:
    files = vocabulary("gpt-2").parent.glob("ggml-vocab-*.gguf")
    names = {file.stem.removeprefix("ggml-vocab-") for file in files}
    assert names == {*QUICK, *SLOW, *WITHOUT_IDS, *REFUSED}
