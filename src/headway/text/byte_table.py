"""The bytes of each token.

Decoding is `b"".join(bytes of the tokens).decode("utf-8", "replace")`: a homomorphism from token sequences to
bytes, so that decoding one token at a time equals decoding all at once, also for byte sequences that are not
UTF-8 and for characters whose bytes are in several tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"  # SentencePiece's visible space


@dataclass(frozen=True)
class ByteTable:
    """bytes_of[id] is what token `id` contributes (None: no such token); `strips_space`: one leading space of the
    whole text is an artefact of the tokenizer and is removed."""

    bytes_of: list[bytes | None]
    strips_space: bool


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted: character -> byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def byte_table(backend: Backend) -> ByteTable | None:
    """The table of a tokenizer with a byte-level, byte-fallback or SentencePiece decoder; None for other kinds
    (WordPiece)."""
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    vocabulary = {i: piece for piece, i in backend.get_vocab(with_added_tokens=True).items()}
    bytes_of: list[bytes | None] = [None] * (max(vocabulary, default=-1) + 1)
    if kinds == ["ByteLevel"]:
        alphabet = byte_level_alphabet()
        for i, piece in vocabulary.items():
            known = all(c in alphabet for c in piece)
            bytes_of[i] = bytes(alphabet[c] for c in piece) if known else piece.encode()
        return ByteTable(bytes_of, strips_space=False)
    plain = kinds == ["ByteFallback", "Fuse"]
    if not plain and not _is_sentencepiece(steps):
        return None
    fallback = "ByteFallback" in kinds
    for i, piece in vocabulary.items():
        byte = _BYTE_PIECE.fullmatch(piece) if fallback else None
        text = piece if plain else piece.replace(SPACE, " ")
        bytes_of[i] = bytes([int(byte[1], 16)]) if byte else text.encode()
    return ByteTable(bytes_of, strips_space=not plain and _strips_space(steps))


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return [{"type": "None"}]
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _is_sentencepiece(steps: list[dict[str, Any]]) -> bool:
    kinds = [step["type"] for step in steps]
    if kinds == ["Metaspace"]:
        return bool(steps[0]["replacement"] == SPACE)
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return False
    return bool(steps[0]["pattern"] == {"String": SPACE} and steps[0]["content"] == " ")


def _strips_space(steps: list[dict[str, Any]]) -> bool:
    last = steps[-1]
    if last["type"] == "Metaspace":
        return bool(last["prepend_scheme"] != "never")
    return bool(
        last["type"] == "Strip" and last["content"] == " " and last["start"] == 1 and last["stop"] == 0
    )
