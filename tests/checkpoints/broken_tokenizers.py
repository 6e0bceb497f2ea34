"""Small intact tokenizers of every kind that headway reads, as files for the fuzzer to break."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headway.text import Tokenizer, train_bpe
from headway.text.sentencepiece import BPE, BYTE, CONTROL, NORMAL, UNIGRAM, UNKNOWN
from headway.text.vocabulary import byte_level_alphabet

WORDS = ["\u2581", "a", "b", "ab", "\u2581a", "\u2581ab", "c"]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##b", "cat"]
CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def message(*fields: tuple[int, int | float | bytes]) -> bytes:
    """Encodes a protocol buffer message: ints as varints, floats as float32, bytes with their length."""
    out = b""
    for number, value in fields:
        if isinstance(value, bytes):
            out += varint(number << 3 | 2) + varint(len(value)) + value
        elif isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            out += varint(number << 3) + varint(value)
    return out


def sentencepiece(kind: int, byte_fallback: bool = False) -> bytes:
    """Returns SentencePiece's `tokenizer.model` with <unk>, <s>, </s>, byte pieces if `byte_fallback`, and WORDS."""
    typed = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    typed += [(f"<0x{b:02X}>", BYTE) for b in range(256)] if byte_fallback else []
    typed += [(word, NORMAL) for word in WORDS]
    pieces = [
        (1, message((1, piece.encode()), (2, -float(i)), (3, code))) for i, (piece, code) in enumerate(typed)
    ]
    trainer = message((3, kind), (35, int(byte_fallback)), (40, 0), (41, 1), (42, 2))
    return message(*pieces, (2, trainer), (3, message((3, 1), (4, 1))))


def llama2c() -> bytes:
    """Returns llama2.c's `tokenizer.bin`."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *WORDS]
    return struct.pack("<i", 6) + b"".join(
        struct.pack("<fi", -float(i), len(piece.encode())) + piece.encode() for i, piece in enumerate(pieces)
    )


def word_piece() -> Tokenizer:
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(BERT)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken(word, special=True) for word in BERT[:5]])
    return Tokenizer(backend, bos=2, eos=3, chat_template=CHAT)


def tokenizers(root: Path) -> list[Path]:
    """Writes folders with vocab.txt, vocab.json and merges.txt, tokenizer.model of three kinds, tokenizer.bin, Marian's
    files, and tokenizer.json of three kinds, each with the configs that belong to it."""
    bytewise = {char: i for i, char in enumerate([*sorted(byte_level_alphabet()), "ab", "<|endoftext|>"])}
    roberta = {
        piece: i
        for i, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b", "ab", "\u0120"])
    }
    marian = {piece: i for i, piece in enumerate(["</s>", "<unk>", ">>fra<<", *WORDS, "<pad>"])}
    ranks = [bytes([b]) for b in range(256)] + [b"ab"]
    added = {"added_tokens_decoder": {"9": {"content": "<x>", "special": True, "lstrip": False}}}
    bpe, unigram = sentencepiece(BPE, byte_fallback=True), sentencepiece(UNIGRAM)
    folders: dict[str, dict[str, Any]] = {
        "bert": {
            "vocab.txt": "\n".join(BERT).encode(), "config.json": {"model_type": "bert", "bos_token_id": 2},
            "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **added},
            "special_tokens_map.json": {"cls_token": "[CLS]", "mask_token": {"content": "[MASK]", "lstrip": True}},
        },
        "gpt2": {
            "vocab.json": bytewise, "merges.txt": b"#version: 0.2\na b\n", "added_tokens.json": {"<x>": 258},
            "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False},
        },
        "roberta": {
            "vocab.json": roberta, "merges.txt": b"#version: 0.2\na b\n",
            "tokenizer_config.json": {"tokenizer_class": "RobertaTokenizer", "trim_offsets": True},
        },
        "bpe": {
            "tokenizer.model": bpe, "tokenizer_config.json": {"add_bos_token": True, "chat_template": CHAT},
            "generation_config.json": {"bos_token_id": 1, "eos_token_id": [2]},
        },
        "unigram": {
            "spiece.model": unigram, "tokenizer_config.json": {"tokenizer_class": "T5Tokenizer", "extra_ids": 3},
        },
        "tiktoken": {
            "tokenizer.model": b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(ranks)),
            "tokenizer_config.json": {"chat_template": [{"name": "default", "template": CHAT}]},
        },
        "llama2c": {"tokenizer.bin": llama2c()},
        "marian": {
            "source.spm": unigram, "target.spm": bpe, "vocab.json": marian,
            "tokenizer_config.json": {"separate_vocabs": False, "eos_token": "</s>"},
        },
        "two vocabs": {
            "source.spm": unigram, "target.spm": unigram, "vocab.json": marian, "target_vocab.json": marian,
            "tokenizer_config.json": {"separate_vocabs": True},
        },
    }  # fmt: skip
    saved = []
    for name, files in folders.items():
        (root / name).mkdir(parents=True)
        for file, content in files.items():
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            (root / name / file).write_bytes(raw)
        saved.append(root / name)
    trained = train_bpe(["the cat sat on the mat\n" * 3], 262, special_tokens=["<|user|>"])
    kinds = {"byte level": trained, "word piece": word_piece(), "spm": Tokenizer.load(root / "bpe")}
    for name, tokenizer in kinds.items():
        tokenizer.save(root / name)
        saved.append(root / name)
    return saved
