"""The vocabularies that llama.cpp's sources carry give the ids beside them, and again as Hugging Face folders."""

from pathlib import Path

import pytest

from headway.text import Tokenizer
from tests.data import llama_cpp_path

QUICK = ["bert-bge", "gpt-2", "llama-spm"]
BETWEEN = "\n__ggml_vocab_test__\n"


def vocabulary(name: str) -> Path:
    return llama_cpp_path(f"models/ggml-vocab-{name}.gguf")


@pytest.mark.parametrize("name", QUICK)
def test_a_published_vocabulary_gives_its_ids(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = vocabulary(name)
    texts = Path(f"{path}.inp").read_bytes().decode().removesuffix(BETWEEN).split(BETWEEN)
    rows = [[int(token) for token in line.split()] for line in Path(f"{path}.out").read_text().splitlines()]
    tokenizer = Tokenizer.load(path)
    tokenizer.save(tmp_path)
    again, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text, ids in zip(texts, rows, strict=True):
        assert tokenizer.encode(text, bos=False, eos=False) == ids
        assert again.encode(text, bos=False, eos=False) == ids
        assert theirs.encode(text, add_special_tokens=False) == ids
