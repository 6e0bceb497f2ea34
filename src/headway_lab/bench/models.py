"""Whole models to measure, with random weights, and the same weights for `transformers` and llama.cpp.

Legend: V vocab.
"""

import importlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from headway import hardware
from headway.checkpoints import change_pairing, load_folder, load_model, save_folder
from headway.checkpoints.formats.gguf.architectures import ARCHITECTURES
from headway.checkpoints.formats.gguf.metadata import architecture_of
from headway.checkpoints.formats.gguf.model import write_model
from headway.models import Decoder, ModelSpec, build
from headway.models.cost import parameter_count
from headway.models.quantize import compress_model
from headway.nn import Experts, linears
from headway.nn.weights import Nf4, from_codes
from headway.positions import Rotary
from headway.quantization import quantize_weights
from headway.storage.gguf_blocks import BF16, CODED, Q4_0, Q8_0, TYPES, BlockType
from headway.text import Tokenizer
from headway.text.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, Pieces
from headway.text.sentencepiece import build as build_pieces
from headway.text.vocabulary import SPACE
from headway_lab.bench.inputs import UnsupportedCase


def _llama(layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocab: int) -> ModelSpec:
    return ModelSpec.of(
        "llama",
        vocab=vocab,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        hidden=hidden,
        tied=False,
        positions=Rotary(10000.0, pairing="halves"),
        trained_context=4096,
    )


DECODERS: Mapping[str, ModelSpec] = {
    "tiny": _llama(layers=2, width=256, heads=4, kv_heads=2, hidden=512, vocab=512),
    "32m": _llama(layers=8, width=512, heads=8, kv_heads=4, hidden=1408, vocab=8192),
    "1.1b": _llama(layers=22, width=2048, heads=32, kv_heads=4, hidden=5632, vocab=32000),
    "moe-166m": ModelSpec.of(
        "qwen3_moe",
        vocab=8192,
        width=512,
        layers=8,
        heads=8,
        kv_heads=4,
        head_dim=64,
        hidden=384,
        experts=Experts(count=32, top=4),
    ),
    "hybrid-0.8b": ModelSpec.of(
        "qwen3_5_text",
        vocab=248320,
        width=1024,
        layers=24,
        heads=8,
        kv_heads=2,
        head_dim=256,
        hidden=3584,
        trained_context=4096,
    ),
}
"""LLaMAs named by size ("1.1b" is TinyLlama's, "32m" can be trained here, "tiny" is for trials), a small Qwen3-MoE, and
a hybrid with the sizes of Qwen3.5-0.8B."""

WORDS = 259
"""The first token id that is a word; lower ids are special tokens or bytes."""
WEIGHTS: Mapping[str, BlockType | None] = {
    "bf16": BF16,
    "int8": Q8_0,
    "int4": Q4_0,
    **{CODED[kind.name]: kind for kind in TYPES if kind.block == 256},
    "nf4": None,
    "int8-row": None,
    "compressed": None,
}
"""The weight formats, and the GGUF type with as many bits per weight: 16, 8.5, 4.5, and in blocks of 256 inputs 4.5,
5.5 and 6.6. No GGUF type has NF4, one scale per row (as `--group -1` of `headway quantize` writes), or bf16 in 11 bits
(`headway.models.quantize`)."""


def transformers() -> Any:
    """Returns the package. Raises UnsupportedCase if it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UnsupportedCase('transformers is not installed; pip install "headway[transformers]"') from error


class Written:
    """A model of `DECODERS`, or of another spec, written to a folder in bfloat16, from which every side loads it."""

    def __init__(self, name: str, folder: Path, spec: ModelSpec | None = None) -> None:
        self.name, self.spec, self.folder = name, spec or DECODERS[name], folder

    @cached_property
    def hf(self) -> Path:
        """Its Hugging Face folder, written on first access. Raises UnsupportedCase if the model, its copy in
        transformers and its GGUF file do not fit into memory."""
        needed, free = 8 * parameter_count(self.spec), hardware.memory_available()
        if needed > free:
            raise UnsupportedCase(
                f"{self.name} and its peers need {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are available"
            )
        save_folder(self.folder / "hf", build(self.spec, dtype=torch.bfloat16, seed=0))
        return self.folder / "hf"

    def ours(self, weights: str) -> Decoder:
        """Loads it in headway; weights of 8 bits or fewer in a GGUF format come from the GGUF file (`headway quantize`
        searches for better codes of as many bytes, which takes minutes), with everything else in bfloat16."""
        if WEIGHTS[weights] not in (None, BF16):
            return load_model(self.gguf(weights), dtype=torch.bfloat16)
        model = load_model(self.hf)
        if weights == "compressed":
            compress_model(model)
        elif weights in ("int8-row", "nf4"):
            for layer in linears(model.eval().requires_grad_(False)).values():
                w = layer.matrix
                layer.keep(Nf4.pack(w) if weights == "nf4" else from_codes(quantize_weights(w, 8)))
        return model

    def transformers(self) -> Any:
        """Loads it in transformers, without changes. Raises UnsupportedCase if that is not installed."""
        hf = transformers()
        hf.utils.logging.disable_progress_bar()
        return hf.AutoModelForCausalLM.from_pretrained(self.hf, dtype=torch.bfloat16).eval()

    def gguf(self, weights: str, tokenizer: Tokenizer | None = None) -> Path:
        """Returns it as a GGUF file for llama.cpp, written on first use. Raises UnsupportedCase if no GGUF type matches
        these weights."""
        if (block_type := WEIGHTS[weights]) is None:
            raise UnsupportedCase(f"GGUF has no type like {weights}")
        path = self.folder / f"{weights}{'-words' if tokenizer else ''}.gguf"
        if not path.exists():
            folder_model = load_folder(self.hf)
            pairing = ARCHITECTURES[architecture_of(folder_model.spec)].pairing
            state, spec = change_pairing(folder_model.tensors, folder_model.spec, pairing)
            keys = None if tokenizer is None else tokenizer.gguf_metadata(spec.vocab)
            write_model(path, spec, state, block_type, tokenizer=keys)
        return path

    def in_words(self, weights: str) -> Path:
        """Returns the Hugging Face folder with a tokenizer of the same words. Raises UnsupportedCase for weights other
        than bf16."""
        if weights != "bf16":
            raise UnsupportedCase(f"transformers serves bf16 weights only, not {weights}")
        names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        words = {
            name: i for i, name in enumerate([*names, *(f"w{i}" for i in range(self.spec.vocab - WORDS))])
        }
        model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
        split = {"type": "WhitespaceSplit"}
        tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": split, "model": model}
        (self.hf / "tokenizer.json").write_text(json.dumps(tokenizer))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
        (self.hf / "tokenizer_config.json").write_text(json.dumps(config))
        return self.hf

    def served(self, weights: str) -> Path:
        """Returns the GGUF file with a tokenizer of made-up words."""
        return self.gguf(weights, words_of(self.spec.vocab))


def words_of(vocab: int) -> Tokenizer:
    """Returns a tokenizer of bytes and made-up words."""
    words = [f"{SPACE}w{i}" for i in range(vocab - WORDS)]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)]
    return Tokenizer(build_pieces(Pieces(pieces, [0.0] * len(pieces), kinds)), bos=1, eos=2)


def written_models(names: Sequence[str], weights: Sequence[str]) -> Iterator[tuple[Written, str]]:
    """Yields each model with each of these weights; a model's folder exists until the next model is taken."""
    for name in names:
        with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
            written = Written(name, Path(folder))
            yield from ((written, kind) for kind in weights)


@cache
def ids_of(name: str, count: int) -> tuple[int, ...]:
    """Returns random token ids."""
    noise = torch.Generator().manual_seed(count)
    return tuple(torch.randint(DECODERS[name].vocab, (count,), generator=noise).tolist())
