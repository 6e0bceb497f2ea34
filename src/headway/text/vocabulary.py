"""The ids of a tokenizer: names, special tokens by role, and decoding, all at once or one token at a time."""

import codecs
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headway.errors import CheckpointError, DataError, check_known

# Special tokens by role, with their usual names; bos and eos have none.
ROLES = {"cls": ["[CLS]"], "sep": ["[SEP]"], "mask": ["[MASK]", "<mask>"], "pad": ["[PAD]", "<pad>"],
          "unk": ["[UNK]", "<unk>"]}  # fmt: skip

LARGEST_ID = 1 << 24
"""Upper bound of ids: tables have a row for each id."""
SPACE = "\u2581"  # SentencePiece's visible space
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """The ids of a `tokenizers.Tokenizer`. `bos`, `eos`, `cls`, `sep`, `mask`, `pad`, `unk` are ids, or None."""

    def __init__(
        self, backend: Backend, *, bos: int | None, eos: int | None, special: Mapping[str, int]
    ) -> None:
        """`special`: ids by role; an absent role takes the special token with its usual name, if there is one. Raises
        DataError for unknown roles or ids, and for an id of `LARGEST_ID` or more.
        """
        largest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
        if largest >= LARGEST_ID:
            raise DataError(f"a token has the id {largest:,}; ids must be below {LARGEST_ID:,}")
        for role in special:
            check_known(role, ROLES, "no special token is called", error=DataError)
        named = [i for i in (bos, eos, *special.values()) if i is not None]
        unknown = [i for i in named if backend.id_to_token(i) is None]
        if unknown:
            raise DataError(
                f"special token id {unknown[0]} is not in the vocabulary of {backend.get_vocab_size()} tokens"
            )
        controls = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        add_controls(
            backend, [str(backend.id_to_token(i)) for i in dict.fromkeys(named) if i not in controls]
        )
        self.backend, self.bos, self.eos = backend, bos, eos
        usual_ids = {role: map(backend.token_to_id, names) for role, names in ROLES.items()}
        by_role = {
            role: next((i for i in ids if i in self.special_ids), None) for role, ids in usual_ids.items()
        }
        self.cls, self.sep, self.mask, self.pad, self.unk = ({**by_role, **special}[role] for role in ROLES)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._names, default=-1) + 1

    @cached_property
    def _names(self) -> dict[int, str]:
        return {i: name for name, i in self.backend.get_vocab(with_added_tokens=True).items()}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens: BOS, EOS, chat markers."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def need(self, role: str) -> int:
        """Returns the id of the special token `role` (bos, eos, cls, sep, mask, pad, unk). Raises DataError if there is
        none."""
        roles = ("bos", "eos", *ROLES)
        check_known(role, roles, "no special token is called", error=DataError)
        token: int | None = getattr(self, role)
        if token is None:
            has = ", ".join(r for r in roles if getattr(self, r) is not None) or "none of them"
            raise DataError(f"this tokenizer has no {role} token (it has {has}); use a tokenizer with one")
        return token

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that identify the tokenizer: SHA-256 of everything that determines ids."""
        return hashlib.sha256(self.backend.to_str().encode()).digest()

    def require_fits(self, embedding_rows: int) -> None:
        """Raises CheckpointError if an id lies outside an embedding of `embedding_rows` rows."""
        require_rows(self.vocab_size, embedding_rows)

    def unused_ids(self, embedding_rows: int) -> list[int]:
        """Returns the rows of the embedding without a token (padding of the vocabulary), which must never be
        sampled."""
        return [i for i in range(embedding_rows) if i not in self._names]

    def decode(
        self, ids: Sequence[int], *, after: Sequence[int] = (), special: bool | Collection[int] = False
    ) -> str:
        """Returns the text of `ids`, which follow the ids `after` (a prompt). Special tokens give text only if
        `special` is True or contains them."""
        if self.table is None:
            before_ids, shown_ids = ([i for i in part if self.gives(i, special)] for part in (after, ids))
            before = self.backend.decode(before_ids, skip_special_tokens=False) if before_ids else ""
            return str(
                self.backend.decode([*before_ids, *shown_ids], skip_special_tokens=False)[len(before) :]
            )
        stream = self.stream(after=after, special=special)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(
        self, *, after: Sequence[int] = (), special: bool | Collection[int] = False
    ) -> "StreamDecoder":
        """Returns a decoder for one token at a time; see StreamDecoder."""
        return StreamDecoder(self, after=after, special=special)

    def token(self, token: int) -> str:
        """Returns the name of an id. Raises DataError for an unknown id."""
        if token not in self._names:
            raise DataError(f"token id {token} is not in the vocabulary of {self.vocab_size} tokens")
        return self._names[token]

    @cached_property
    def table(self) -> "ByteTable | None":
        """The bytes of each token, for byte-level and SentencePiece tokenizers; None for others."""
        return byte_table(self.backend)

    def gives(self, token: int, special: bool | Collection[int]) -> bool:
        """Returns whether a token gives text: a special token only if `special` is True or contains it. Raises
        DataError for an unknown id."""
        self.token(token)
        shows = special if isinstance(special, bool) else token in special
        return shows or token not in self.special_ids

    def text_bytes(self, token: int, *, special: bool | Collection[int]) -> bytes | None:
        """Returns the bytes of a token's text; None if it gives no text. Raises DataError for an unknown id."""
        assert self.table is not None
        return self.table.bytes_of[token] if self.gives(token, special) else None


class StreamDecoder:
    """Decodes a growing token sequence.

    Invariant: `"".join(push(i) for i in ids) + flush() == tokenizer.decode(ids)`, and no delta ends inside a
    character: bytes that may still become one are kept until the next tokens (or `flush`) decide.

    `after`: tokens before the stream (a prompt). They emit no text, but determine whether a SentencePiece tokenizer's
    leading space belongs to the text.
    `special`: show special tokens (BOS, EOS, chat markers) as text, all or those in the collection; by default they
    contribute nothing.
    """

    def __init__(
        self, tokenizer: Vocabulary, *, after: Sequence[int] = (), special: bool | Collection[int] = False
    ) -> None:
        self._tokenizer, self._special, self._table = tokenizer, special, tokenizer.table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips = False
        if self._table is not None:
            begun = any(tokenizer.text_bytes(i, special=special) for i in after)
            self._strips = self._table.strips_space and not begun
        # window[:read] is already emitted; it stays because joining rules depend on the preceding token
        self._window = list(after)[-4:]
        self._read = len(self._window)

    def push(self, token: int) -> str:
        """Returns the text that becomes certain with this token; often empty, sometimes several characters."""
        if self._table is None:
            self._window.append(token)
            return self._advance(final=False)
        piece = self._tokenizer.text_bytes(token, special=self._special) or b""
        if self._strips and piece:
            self._strips, piece = False, piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """Returns the kept bytes that never became a character, as U+FFFD; call it at the end of the stream."""
        return self._advance(final=True) if self._table is None else self._utf8.decode(b"", final=True)

    def _advance(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._window[: self._read], special=self._special)
        whole = self._tokenizer.decode(self._window, special=self._special)
        if not final and whole.endswith("\ufffd"):
            return ""
        self._window = self._window[-4:]
        self._read = len(self._window)
        return whole[len(before) :]


def require_rows(vocab_size: int, embedding_rows: int) -> None:
    """Raises CheckpointError if a vocabulary is larger than the embedding; see `Vocabulary.require_fits`."""
    if vocab_size > embedding_rows:
        raise CheckpointError(
            f"the tokenizer has ids up to {vocab_size - 1} ({vocab_size} tokens) but the model's embedding has "
            f"{embedding_rows} rows: this is not its tokenizer, or tokens were added without resizing the embedding"
        )


def add_controls(backend: Backend, names: Iterable[str]) -> None:
    """Adds control tokens: they are matched in text only on request, and are omitted from decoded text."""
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])


def steps_of(component: Any) -> list[dict[str, Any]]:
    """Returns the steps of a tokenizer's decoder or post-processor, each as `tokenizer.json` has it."""
    state = {"processors": []} if component is None else json.loads(component.__getstate__())
    steps: list[dict[str, Any]] = state.get("decoders", state.get("processors", [state]))
    return steps


@dataclass(frozen=True)
class ByteTable:
    """The bytes of each token.

    Decoding is `b"".join(bytes of the tokens).decode("utf-8", "replace")`: a homomorphism from token sequences to
    bytes, so that decoding one token at a time equals decoding all at once, also for byte sequences that are not UTF-8
    and for characters whose bytes are in several tokens.

    bytes_of[id] is what token `id` contributes; `strips_space`: one leading space of the
    whole text is an artefact of the tokenizer and is removed.
    """

    bytes_of: dict[int, bytes]
    strips_space: bool


def byte_level_alphabet() -> dict[str, int]:
    """Returns the byte of each of GPT-2's printable characters for bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [b for b in range(256) if b not in set(printable)]
    # a space, byte 0x20, is the 33rd unprintable one: chr(256 + 32)
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(unprintable)}


def byte_table(backend: Backend) -> ByteTable | None:
    """Returns the table of a tokenizer with a byte-level, byte-fallback or SentencePiece decoder; None for other kinds
    (WordPiece)."""
    steps = steps_of(backend.decoder)
    kinds = [step["type"] for step in steps]
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if kinds == ["ByteLevel"]:
        alphabet = byte_level_alphabet()
        spelled = {
            i: bytes(alphabet[c] for c in piece) if alphabet.keys() >= set(piece) else piece.encode()
            for piece, i in vocabulary.items()
        }
        return ByteTable(spelled, strips_space=False)
    plain = kinds == ["ByteFallback", "Fuse"]
    strips = False if plain else _strips_space(steps, kinds)
    if strips is None:
        return None
    spelled = {i: (piece if plain else piece.replace(SPACE, " ")).encode() for piece, i in vocabulary.items()}
    if "ByteFallback" in kinds:
        byte_pieces = ((BYTE_PIECE.fullmatch(piece), i) for piece, i in vocabulary.items())
        spelled |= {i: bytes([int(match[1], 16)]) for match, i in byte_pieces if match}
    return ByteTable(spelled, strips)


def _strips_space(steps: list[dict[str, Any]], kinds: list[str]) -> bool | None:
    """Returns whether a SentencePiece decoder strips a leading space; None for any other decoder."""
    if kinds == ["Metaspace"] and steps[0]["replacement"] == SPACE:
        return bool(steps[0]["prepend_scheme"] != "never")
    if kinds not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return None
    first, last = steps[0], steps[-1]
    if first["pattern"] != {"String": SPACE} or first["content"] != " ":
        return None
    return last["type"] == "Strip" and (last["content"], last["start"], last["stop"]) == (" ", 1, 0)
