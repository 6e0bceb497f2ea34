"""SentencePiece and llama2.c files, against SentencePiece itself."""

from pathlib import Path

import pytest

from headway.text import Tokenizer
from tests.data import data_path
from tests.text.folders import pieces, put

TEXTS = [
    "Hello world, this is a test.",
    "  leading and   inner spaces ",
    "def f(x):\n\treturn {x: 1}\n\n\n",
    "我们看见一只猫。今天天气很好",
    "naïve 🙂🙃 \U0001f9d1\u200d\U0001f680 x²",
    "<s> </s> <unk> <0x41>",
    "1234567890 3.14159 MiXeD",
    "",
]


def fused(ids: list[int], unk: int) -> list[int]:
    """Joins neighbouring unknown tokens: a unigram tokenizer's cut inside "</s>" keeps two of them apart."""
    return [a for a, b in zip(ids, [*ids[1:], -1], strict=False) if not a == b == unk]


@pytest.mark.parametrize(
    "file",
    [
        "llama2/tokenizer.model",
        "open_llama_3b/tokenizer.model",
        "chinese_llama_sp_20k/chinese_sp.model",
        "t5/spiece.model",
        "small/torchtune_m.model",
    ],
)
def test_ids_are_sentencepiece_s(file: str) -> None:
    processor = pytest.importorskip("sentencepiece").SentencePieceProcessor(
        model_file=str(data_path(f"tokenizers/{file}"))
    )
    tokenizer = Tokenizer.load(data_path(f"tokenizers/{file}"))
    assert tokenizer.vocab_size == processor.vocab_size()
    for text in TEXTS:
        ids, unk = processor.encode(text), processor.unk_id()
        assert fused(tokenizer.encode(text, bos=False), unk) == fused(ids, unk), text
        if unk not in ids:  # SentencePiece decodes <unk> to a mark of its own
            assert tokenizer.decode(ids) == processor.decode(ids), text


@pytest.mark.parametrize(
    ("kind", "offset", "unk"),
    [("xlm-roberta", 1, 3), ("mbart", 1, 3), ("mbart50", 1, 3), ("pegasus", 103, 105)],
)
def test_numbers_of_a_model_are_sentencepiece_s_and_so_many_more(
    kind: str, offset: int, unk: int, tmp_path: Path
) -> None:
    """The ids of fairseq, where <unk> is 3, and those of Pegasus."""
    tokenizer = Tokenizer.load(put(tmp_path, kind))
    processor = pytest.importorskip("sentencepiece").SentencePieceProcessor(
        model_proto=pieces("pegasus" if kind == "pegasus" else "unigram")
    )
    for text in TEXTS:
        ids = [unk if i == processor.unk_id() else i + offset for i in processor.encode(text)]
        assert fused(tokenizer.encode(text, bos=False), unk) == fused(ids, unk), text
    assert tokenizer.unk == unk


def test_llama2c_s_tokenizer() -> None:
    tokenizer = Tokenizer.load(data_path("weights/stories260K/tok512.bin"))
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (512, 1, 2)
    text = "Once upon a time, there was a little girl named Lily.\n🙂"
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert len(ids) < len(text)
    assert tokenizer.decode(ids) == text
