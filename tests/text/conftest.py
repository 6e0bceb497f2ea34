"""Small tokenizers of every kind that is supported."""

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headway.text import Tokenizer, train_bpe
from headway.text.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, Pieces, build
from tests.data import data_path

CORPUS = [
    "the cat sat on the mat, and the dog sat on the log\n" * 3,
    "def attend(q, k, v):\n    return softmax(q @ k.T) @ v\n" * 3,
    "我们 看 见 一只 猫。我们看见一只狗。" * 3,
    "naïve café 🙂🙃 déjà vu" * 3,
]


def byte_level() -> Tokenizer:
    return train_bpe(CORPUS, 330, special_tokens=["<|user|>", "<|reply|>"])


def sentencepiece() -> Tokenizer:
    """Returns a LLaMA-style tokenizer with byte pieces, made by hand."""
    words = ["▁", *"theacs", "▁t", "he", "▁the", "at", "▁a", "▁c", "▁cat", *"</>猫", "</", "</s"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))]
    return Tokenizer(build(Pieces(pieces, scores, kinds)), bos=1, eos=2)


def word_piece() -> Tokenizer:
    """Returns a BERT-style tokenizer, whose decoder is neither byte-level nor SentencePiece's."""
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "##s", "##ting", "猫", "狗", ",", "."]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken(w, special=True) for w in words[:3]])
    return Tokenizer(backend, eos=2)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "word_piece": word_piece,
}


@pytest.fixture(scope="session", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


@pytest.fixture(scope="session")
def bytes_tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="session")
def llama_tokenizer() -> Tokenizer:
    return Tokenizer.load(data_path("tokenizers/llama2/tokenizer.model"))
