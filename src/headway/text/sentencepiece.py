"""SentencePiece's `tokenizer.model` or `spiece.model` and llama2.c's `tokenizer.bin`, as `tokenizers` backends.

Both are lists of scored pieces. The `.model` file is a protocol buffer (sentencepiece_model.proto, ModelProto); the few
fields that matter are parsed here, so that neither `sentencepiece` nor `protobuf` is needed.
"""

import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headway.errors import DataError, as_error
from headway.text.template import BARE
from headway.text.vocabulary import SPACE, add_controls

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # SentencePiece.Type
UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
OUTER_SPACES = r"\A +| +\z"  # the spaces that remove_extra_whitespaces strips from the ends of a text
FIXED = {1: "<d", 5: "<f"}  # numbers of 64 and 32 bits, by wire type


@dataclass(frozen=True)
class Pieces:
    """Scored pieces and the settings that determine how text is split: everything that `tokenizers` needs."""

    pieces: list[str]
    scores: list[float]
    kinds: list[int]
    model: int = BPE
    unk: int = 0
    bos: int | None = 1
    eos: int | None = 2
    byte_fallback: bool = True
    dummy_prefix: bool = True
    squeeze_spaces: bool = False
    charsmap: bytes = field(default=b"", repr=False)
    absorbing: str | None = None
    """A control token that absorbs the space before it (<mask>)."""
    merges: list[tuple[str, str]] | None = field(default=None, repr=False)
    """The merges of BPE, if they do not follow from the scores."""

    @property
    def names(self) -> dict[str, str | None]:
        """The special tokens by role."""
        ids = {"unk": self.unk, "bos": self.bos, "eos": self.eos}
        return {role: self.pieces[i] for role, i in ids.items() if i is not None}

    def of_kind(self, *kinds: int) -> list[str]:
        """Returns the pieces of these kinds, in order."""
        return [piece for piece, kind in zip(self.pieces, self.kinds, strict=True) if kind in kinds]


def read_model(path: Path, data: bytes | None = None) -> Pieces:
    """Returns the pieces of a SentencePiece `.model` file (BPE or unigram), or of its bytes."""
    rows: list[tuple[str, float, int]] = []
    trainer: dict[int, int] = {}
    normalizer: dict[int, int] = {}
    charsmap = b""
    faults = KeyError, IndexError, TypeError, ValueError, struct.error
    with as_error(DataError, f"{path}: not a SentencePiece model; copy or download it again", *faults):
        for number, value in _fields(path.read_bytes() if data is None else data):
            if number == 1 and isinstance(value, bytes):
                piece = dict(_fields(value))
                text = str(piece[1], "utf-8")  # type: ignore[arg-type]
                rows.append((text, float(piece.get(2, 0.0)), int(piece.get(3, NORMAL))))
            elif number == 2 and isinstance(value, bytes):
                numbers = ((k, v) for k, v in _fields(value) if isinstance(v, int))
                trainer = {k: v - (1 << 64) if v >> 63 else v for k, v in numbers}
            elif number == 3 and isinstance(value, bytes):
                items = list(_fields(value))
                normalizer = {k: v for k, v in items if isinstance(v, int)}
                charsmap = next((v for k, v in items if k == 2 and isinstance(v, bytes)), b"")
    model = trainer.get(3, UNIGRAM)
    if not rows or model not in (UNIGRAM, BPE):
        raise DataError(
            f"{path}: not a SentencePiece model of kind BPE or unigram ({len(rows)} pieces, kind {model})"
        )
    pieces, scores, kinds = map(list, zip(*rows, strict=True))
    unk, bos, eos = trainer.get(40, 0), trainer.get(41, 1), trainer.get(42, 2)
    for role, i in (("unk", unk), ("bos", max(bos, 0)), ("eos", max(eos, 0))):
        if not 0 <= i < len(pieces):
            raise DataError(
                f"{path}: the SentencePiece model has {role} at id {i:,}, but it has {len(pieces)} pieces: it is "
                "damaged, or cut short"
            )
    if not all(map(isfinite, scores)):
        raise DataError(f"{path}: the SentencePiece model has a score that is not finite: it is damaged")
    return Pieces(
        pieces, scores, kinds, model, unk,
        bos if bos >= 0 else None, eos if eos >= 0 else None,
        bool(trainer.get(35, 0)), bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1)), charsmap,
    )  # fmt: skip


def read_llama2c(path: Path) -> Pieces:
    """Returns the pieces of a llama2.c tokenizer file: int32 longest, then (float32 score, int32 length, bytes)
    each."""
    data = path.read_bytes()
    pieces: list[str] = []
    scores: list[float] = []
    at = 4
    with as_error(DataError, f"{path}: not a llama2.c tokenizer", struct.error, UnicodeDecodeError):
        while at < len(data):
            score, length = struct.unpack_from("<fi", data, at)
            if length < 0 or at + 8 + length > len(data):
                raise struct.error(f"piece {len(pieces)} runs past the end of the file")
            pieces.append(data[at + 8 : at + 8 + length].decode().replace(" ", SPACE))
            scores.append(score)
            at += 8 + length
    if len(pieces) < 259 or pieces[3] != "<0x00>":
        raise DataError(
            f"{path}: not a llama2.c tokenizer ({len(pieces)} pieces; <unk>, BOS, EOS, 256 bytes are needed)"
        )
    pieces[:3] = ["<unk>", "<s>", "</s>"]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(pieces) - 259)
    return Pieces(pieces, scores, kinds)


def build(spec: Pieces, *, sentinels: int = 0) -> Backend:
    """Returns the `tokenizers` backend that splits text in the same way.

    A text begins with BOS; if the model has none (T5), it ends with EOS instead. `sentinels`: T5's <extra_id_0>,
    <extra_id_1>, ... which follow the pieces, the first at the highest id (Raffel et al. 2020, section 3.1.4;
    google-research/text-to-text-transfer-transformer, vocabularies).
    """
    ids = {piece: i for i, piece in enumerate(spec.pieces)}
    if len(ids) != len(spec.pieces):
        twice, count = Counter(spec.pieces).most_common(1)[0]
        raise DataError(
            f"this tokenizer has the piece {twice[:80]!r} {count} times; ids would be ambiguous: it is damaged"
        )
    if spec.model == BPE:
        model: models.Model = models.BPE(
            vocab=ids,
            merges=_merges(spec, ids) if spec.merges is None else spec.merges,
            unk_token=spec.pieces[spec.unk],
            fuse_unk=True,
            byte_fallback=spec.byte_fallback,
        )
    else:
        model = models.Unigram(
            [(p, digits(s)) for p, s in zip(spec.pieces, spec.scores, strict=True)],
            spec.unk,
            byte_fallback=spec.byte_fallback,
        )
    backend = Backend(model)
    if spec.model == UNIGRAM:
        backend.pre_tokenizer = breaker(spec.of_kind(CONTROL, UNKNOWN, BYTE))
    backend.normalizer = _normalizer(spec)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if spec.dummy_prefix else steps)
    if spec.absorbing is not None:
        mask = AddedToken(spec.absorbing, lstrip=True, special=True, normalized=False)
        backend.add_special_tokens([mask])
    add_controls(backend, [*spec.of_kind(CONTROL), *spec.of_kind(UNKNOWN)])
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in spec.of_kind(USER_DEFINED)])
    add_controls(backend, [f"<extra_id_{i}>" for i in reversed(range(sentinels))])
    if spec.bos is not None:
        backend.post_processor = BARE.beginning(spec.bos, True).processor(backend)
    elif spec.eos is not None:
        backend.post_processor = BARE.ending(spec.eos, True).processor(backend)
    return backend


def digits(score: float) -> float:
    """Rounds a score to the 9 digits that identify a float32: JSON readers reproduce these exactly, so that a saved
    tokenizer is the same after loading."""
    return float(f"{score:.9g}")


def _normalizer(spec: Pieces) -> normalizers.Normalizer:
    prepare = [normalizers.Precompiled(spec.charsmap)] if spec.charsmap else []
    around, inside = normalizers.Replace(Regex(OUTER_SPACES), ""), normalizers.Replace(Regex(" {2,}"), " ")
    squeeze = [around, inside] if spec.squeeze_spaces else []
    prefix = [normalizers.Prepend(SPACE)] if spec.dummy_prefix else []
    return normalizers.Sequence([*prepare, *squeeze, *prefix, normalizers.Replace(" ", SPACE)])


def breaker(controls: Sequence[str]) -> pre_tokenizers.PreTokenizer:
    """Returns a pre-tokenizer that splits after the first character of text that looks like one of `controls`:
    otherwise the best path through a unigram vocabulary could turn a user's text into control tokens."""
    places = [f"{re.escape(p[0])}(?={re.escape(p[1:])})" for p in controls if len(p) > 1]
    return pre_tokenizers.Split(Regex("|".join(places) or r"(?!)"), "merged_with_previous")


def _merges(spec: Pieces, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Returns every split of every piece into two pieces, best score first: SentencePiece merges the adjacent pair
    whose joint piece scores best. Control, unknown and byte pieces are never made of text."""
    usable = set(spec.of_kind(NORMAL, USER_DEFINED))
    pairs = [
        (-score, ids[piece[:cut]], ids[piece[cut:]], piece[:cut], piece[cut:])
        for piece, score in zip(spec.pieces, spec.scores, strict=True)
        if piece in usable
        for cut in range(1, len(piece))
        if piece[:cut] in usable and piece[cut:] in usable
    ]
    return [(left, right) for *_, left, right in sorted(pairs)]


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yields (field number, value) of a protocol buffer message: varints, 32- and 64-bit numbers, bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        value: int | float | bytes
        if wire == 0:
            value, at = _varint(data, at)
        elif wire == 2:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise IndexError(f"field {number} runs past the end of the file")
            value, at = data[at : at + length], at + length
        elif wire in FIXED:
            (value,) = struct.unpack_from(FIXED[wire], data, at)
            at += struct.calcsize(FIXED[wire])
        else:
            raise KeyError(f"wire type {wire}")
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the varint at `at`, 7 bits per byte, the lowest first, and where it ends: AC 02 is 0x2C | 2 << 7 =
    300."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift >= 70:
            raise IndexError("a whole number of more than 10 bytes")


def looks_like_tiktoken(path: Path) -> bool:
    """Returns whether a file holds base64 ranks, which Llama 3 ships under the name `tokenizer.model`."""
    with path.open("rb") as file:
        return re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", file.read(200)) is not None
