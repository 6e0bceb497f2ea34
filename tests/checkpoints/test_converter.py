"""llama.cpp's own converter on our folders: the same tensors, bit for bit, and the same metadata as in the file that we
write; the file gives our logits, here and in llama.cpp."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.checkpoints import convert
from headway.checkpoints.formats.gguf.model import write_model
from headway.storage.gguf import GGUF, read_gguf
from headway.storage.gguf_blocks import F32, dequantize
from headway.storage.tensors import Tensors
from headway.text import Tokenizer
from tests.checkpoints.gguf_files import SPECS, weights
from tests.checkpoints.llama_cpp import converted
from tests.data import data_path, llama_cpp_path

pytestmark = pytest.mark.slow
PIECES = ("gemma", "gemma2", "gemma3", "phi3", "ernie4_5")
"""Families whose converter asks for a file of SentencePiece; the others have GPT-2's vocabulary."""
REFUSED: dict[str, str] = {}
"""What the converter refuses, and why."""


def folder_of(name: str, home: Path) -> Path:
    """A folder of transformers, with a vocabulary that the converter knows."""
    spec = SPECS[name]
    pieces = name in PIECES
    tokenizer = Tokenizer.load(
        data_path("tokenizers/llama2") if pieces else llama_cpp_path("models/ggml-vocab-gpt-2.gguf")
    )
    spec = replace(spec, vocab=len(tokenizer))
    write_model(home / "start.gguf", spec, weights(spec), F32, tokenizer=tokenizer.gguf_metadata(spec.vocab))
    convert(home / "start.gguf", home / "folder", tokenizer=tokenizer)
    return home / "folder"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str | None]]:
    """The folder of every family and what the converter said of it: one process, which takes a second to begin."""
    home = tmp_path_factory.mktemp("converter")
    folders = {}
    for name in SPECS:
        (home / name).mkdir()
        folders[name] = folder_of(name, home / name)
    said = converted({folder: folder.with_name("theirs.gguf") for folder in folders.values()})
    return {name: (folder, said[folder]) for name, folder in folders.items()}


def tensors(file: GGUF) -> dict[str, torch.Tensor]:
    stored = Tensors(file.tensors)
    return {n: dequantize(stored[n], one.type).view(one.numbers) for n, one in file.tensors.items()}


@pytest.mark.parametrize("name", SPECS)
def test_its_file_is_ours(made: Any, name: str) -> None:
    folder, said = made[name]
    if name in REFUSED:
        assert said is not None
        assert REFUSED[name] in said
        return
    assert said is None
    theirs = read_gguf(folder.with_name("theirs.gguf"))
    convert(folder, folder.with_name("ours.gguf"))
    ours = read_gguf(folder.with_name("ours.gguf"))
    a, b = tensors(ours), tensors(theirs)
    assert a.keys() == b.keys()
    for n in a:
        assert a[n].shape == b[n].shape, n
        assert torch.equal(a[n], b[n]), n
        assert ours.tensors[n].type == theirs.tensors[n].type, n
