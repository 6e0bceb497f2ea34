"""A small NLLB: its tokenizer as transformers saves it, and a model with random weights."""

import json
from pathlib import Path

import transformers

from headway.checkpoints import save_folder
from headway.models import EncoderDecoder, ModelSpec, build
from headway.text import Tokenizer
from headway.text.sentencepiece import NORMAL, read_model
from tests.text.folders import pieces

SPECIALS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}


def vocabulary() -> dict[str, int]:
    """Returns a vocabulary with fairseq's special tokens first and the pieces in another order than SentencePiece's."""
    spec = read_model(Path("bpe"), pieces("bpe"))
    normal = sorted(piece for piece, kind in zip(spec.pieces, spec.kinds, strict=True) if kind == NORMAL)
    return {**SPECIALS, **{piece: i for i, piece in enumerate([*normal, "never"], 4)}}


def write_nllb(words: Path, model: Path) -> None:
    """Writes the tokenizer's folder, and the model's, which has the tokenizer, too; neither names a language."""
    ids = vocabulary()
    spelled = [piece for piece in ids if len(piece) == 2]
    merges = [(piece[0], piece[1]) for piece in spelled if piece[0] in ids and piece[1] in ids]
    theirs = transformers.NllbTokenizer(vocab=ids, merges=merges, src_lang=None)
    theirs.save_pretrained(words)
    config = json.loads((words / "tokenizer_config.json").read_text())
    (words / "tokenizer_config.json").write_text(json.dumps({**config, "src_lang": None}))
    size = {"vocab": len(theirs), "width": 32, "layers": 2, "heads": 4, "hidden": 48, "init_std": 0.3}
    module = build(ModelSpec.of_pair("m2m_100", **size), seed=0).eval()
    assert isinstance(module, EncoderDecoder)
    save_folder(
        model,
        module,
        tokenizer=Tokenizer.load(words),
        generation={"decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1},
    )
