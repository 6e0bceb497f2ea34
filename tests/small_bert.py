"""A random BERT of `transformers` in a folder with a vocabulary, and its outputs for texts."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from headway.text import Tokenizer

WORDS = """the cat sat on a mat dog ran home . , who where is not ##s ##ting 猫
b c d e f g""".split()  # noqa: SIM905
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
SIZE: dict[str, Any] = {
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "initializer_range": 0.3,
}
TEXTS = ["the cat sat on a mat .", "who ran home", "猫"]
LABELS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC"}


def folder_of(path: Path, model: Any) -> Path:
    model.save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(VOCAB), encoding="utf-8")
    return path


def bert(path: Path, kind: str, **config: Any) -> tuple[Path, Any]:
    torch.manual_seed(3)
    model = getattr(transformers, f"Bert{kind}")(transformers.BertConfig(**SIZE, **config)).eval()
    return folder_of(path, model), model


def theirs(model: Any, texts: list[Any]) -> tuple[list[list[int]], list[Tensor]]:
    """Returns ids and logits (or last hidden states) of each text alone."""
    tokenizer = Tokenizer.load(Path(model.name_or_path)) if model.name_or_path else None
    assert tokenizer is not None
    ids, outs = [], []
    for text in texts:
        inputs = tokenizer.inputs([text], special=True)[0]
        with torch.no_grad():
            out = model(torch.tensor([inputs.ids]), token_type_ids=torch.tensor([inputs.token_types]))
        ids.append(inputs.ids)
        outs.append(out[0][0])
    return ids, outs
