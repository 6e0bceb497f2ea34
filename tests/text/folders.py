"""Tokenizer folders as people have them, put together from published files, and texts on which tokenizers differ."""

import json
import shutil
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from tests.data import data_path

TEXTS = [
    "Hello world, this is a test.",
    "  leading and   inner spaces ",
    "def f(x):\n\treturn {x: 1}\n\n\n",
    "我们看见一只猫。今天weather很好，３.5度",
    "naïve café 🙂🙃 \U0001f9d1\u200d\U0001f680 x²",
    "1234567890 3.14159 MiXeD ÀÉ I'll DON'T",
    "",
    "a\x00b\x07c\u00a0d\u3000e\u200bf\ufeffg",
    "\r\n\t ",
    "한글 עברית ไทย İstanbul ǅ ß ﬁ①Ａ a\u0301b",
]
BERT, GPT2, MERGES = "bert/bert_base_uncased_vocab.txt", "gpt2/encoder.json", "gpt2/vocab.bpe"
ROBERTA = {"vocab.json": "roberta_longformer/vocab.json", "merges.txt": MERGES}
Folder = tuple[dict[str, str], dict[str, Any]]
# kind: (name in the folder -> file of the data, tokenizer_config.json); transformers reads these folders as they are
READ_BY_BOTH: dict[str, Folder] = {
    "bert": ({"vocab.txt": BERT}, {"tokenizer_class": "BertTokenizer"}),
    "bert-cased": ({"vocab.txt": BERT}, {"tokenizer_class": "BertTokenizer", "do_lower_case": False}),
    "bert-chinese": ({"vocab.txt": "bert/bert_base_chinese_vocab.txt"}, {"tokenizer_class": "BertTokenizer"}),
    "gpt2": ({"vocab.json": GPT2, "merges.txt": MERGES}, {"tokenizer_class": "GPT2Tokenizer"}),
    "roberta": (ROBERTA, {"tokenizer_class": "RobertaTokenizer"}),
    "longformer": (ROBERTA, {"tokenizer_class": "LongformerTokenizer", "add_prefix_space": True}),
    "qwen2": ({"vocab.json": GPT2, "merges.txt": MERGES}, {"tokenizer_class": "Qwen2Tokenizer"}),
}
# files that are trained here, with fairseq's ids or others
FAIRSEQ = "sentencepiece.bpe.model"
TRAINED: dict[str, Folder] = {
    "xlm-roberta": ({FAIRSEQ: "unigram"}, {"tokenizer_class": "XLMRobertaTokenizer"}),
    "camembert": ({FAIRSEQ: "unigram"}, {"tokenizer_class": "CamembertTokenizer"}),
}
PIECES = {
    "unigram": {"model_type": "unigram"},
    "bpe": {"model_type": "bpe"},
    "pegasus": {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
}
# transformers needs protobuf or tiktoken for these; it reads them after we have saved them
SAVED_BY_US: dict[str, Folder] = {
    # transformers reads these files without SentencePiece's rules for spaces at the ends, or for characters
    "mbart": ({FAIRSEQ: "unigram"}, {"tokenizer_class": "MBartTokenizer", "src_lang": "ro_RO"}),
    "mbart50": ({FAIRSEQ: "unigram"}, {"tokenizer_class": "MBart50Tokenizer", "src_lang": "en_XX"}),
    "pegasus": ({"spiece.model": "pegasus"}, {"tokenizer_class": "PegasusTokenizer"}),
    "t5": ({"spiece.model": "t5/spiece.model"}, {"tokenizer_class": "T5Tokenizer"}),
    "tiktoken": ({"tokenizer.model": "small/torchtune_tiktoken_small.model"}, {}),
    "llama2": ({"tokenizer.model": "llama2/tokenizer.model"}, {"tokenizer_class": "LlamaTokenizer"}),
    "open_llama": ({"tokenizer.model": "open_llama_3b/tokenizer.model"}, {}),
    "unigram": ({"tokenizer.model": "small/torchtune_m.model"}, {}),
    "unigram-chinese": ({"tokenizer.model": "chinese_llama_sp_20k/chinese_sp.model"}, {}),
    "llama3": ({"tokenizer.model": "llama3/tokenizer.model"}, {}),
    "llama2c": ({"tokenizer.bin": "small/stories_tok512.bin"}, {}),
}
SLOW = {"bert-cased", "longformer", "qwen2", "open_llama", "llama2", "llama3", "unigram-chinese"}


@cache
def pieces(kind: str) -> bytes:
    """Returns a small SentencePiece model of a kind in `PIECES`, trained on `TEXTS`; skips the test without
    SentencePiece."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in TEXTS for _ in range(3)]), model_writer=model, vocab_size=150,
        hard_vocab_limit=False, minloglevel=2, **PIECES[kind],
    )  # fmt: skip
    return model.getvalue()


def put(folder: Path, kind: str) -> Path:
    """Writes and returns the folder of a kind; skips the test if its files are absent."""
    files, config = {**READ_BY_BOTH, **TRAINED, **SAVED_BY_US}[kind]
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in files.items():
        if source in PIECES:
            (folder / name).write_bytes(pieces(source))
        else:
            shutil.copyfile(data_path(f"tokenizers/{source}"), folder / name)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
