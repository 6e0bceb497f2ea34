"""SentencePiece models with renumbered pieces: fairseq puts its own control tokens in front, and models add further
tokens at the end."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend

from headway.errors import DataError, check_known
from headway.text import bytelevel, sentencepiece
from headway.text.languages import M2M100, MBART, MBART50, WMT21
from headway.text.sentencepiece import CONTROL, NORMAL, UNKNOWN, UNUSED, Pieces
from headway.text.template import BARE, A, B, Part, Template
from headway.text.tokenizer_config import need_tokens

FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")
CAMEMBERT = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED")
PEGASUS = ("<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{i}>" for i in range(2, 103)))
LOWEST = -100.0
"""A score below all others."""


class Numbering(NamedTuple):
    """How a model numbers the pieces of its file: `before`, then the file's pieces from index `first` on, then
    `behind`.

    `template` makes the template of texts from the piece -> id table (None: none here; translators have one by
    language); `roles` are the special tokens by role."""

    before: tuple[str, ...]
    first: int
    behind: tuple[str, ...] = ()
    template: Callable[[Mapping[str, int]], Template] | None = None
    roles: Mapping[str, str] = bytelevel.ROBERTA


def _roberta(ids: Mapping[str, int]) -> Template:
    """Returns the template <s> a </s>, and <s> a </s> </s> b </s>."""
    cls, sep = Part(ids["<s>"], None, 0), Part(ids["</s>"], None, 0)
    return Template((cls, A, sep), (cls, A, sep, sep, B._replace(type=0), sep))


def _ended(ids: Mapping[str, int]) -> Template:
    """Returns the template a </s>, and a b </s>."""
    end = Part(ids["</s>"], None, 0)
    return Template((*BARE.single, end), (*BARE.pair, end))


NUMBERINGS: Mapping[str, Numbering] = {
    "xlmroberta": Numbering(FAIRSEQ, 3, ("<mask>",), _roberta),
    "camembert": Numbering(CAMEMBERT, 1, ("<mask>",), _roberta),
    "mbart": Numbering(FAIRSEQ, 3, (*MBART, "<mask>")),
    "mbart50": Numbering(FAIRSEQ, 3, (*MBART50, "<mask>")),
    "pegasus": Numbering(
        PEGASUS, 2, (), _ended, {role: bytelevel.ROBERTA[role] for role in ("eos", "unk", "pad")}
    ),
}
"""Numberings by the kind of tokenizer."""


def read(file: Path, kind: str, config: Mapping[str, Any]) -> tuple[Backend, dict[str, str | None]]:
    """Returns the tokenizer of a kind in `NUMBERINGS`, or of M2M100, from its SentencePiece file, and special tokens by
    role.

    Raises DataError for a file that is not of that kind."""
    spec, numbering = sentencepiece.read_model(file), NUMBERINGS.get(kind, Numbering(FAIRSEQ, 3))
    pieces = _numbered(spec, numbering, file) if kind in NUMBERINGS else _by_vocabulary(spec, file, config)
    backend = sentencepiece.build(pieces)
    ids = {piece: i for i, piece in enumerate(pieces.pieces)}
    if numbering.template is not None:
        backend.post_processor = numbering.template(ids).processor(backend)
    return backend, {role: name for role, name in numbering.roles.items() if name in ids}


def _numbered(spec: Pieces, how: Numbering, file: Path) -> Pieces:
    """Returns the pieces in the order of a model's ids."""
    kept = range(how.first, len(spec.pieces))
    names = (*how.before, *(spec.pieces[i] for i in kept), *how.behind)
    if "<unk>" not in names or spec.pieces[: how.first].count("<unk>") != how.before.count("<unk>"):
        raise DataError(
            f"{file}: its first {how.first} pieces are {', '.join(map(repr, spec.pieces[: how.first]))}, which are not "
            "those of a tokenizer of this kind; check tokenizer_class in tokenizer_config.json"
        )
    scores = [*(0.0 for _ in how.before), *(spec.scores[i] for i in kept), *(0.0 for _ in how.behind)]
    kinds = [*map(_kind, how.before), *(spec.kinds[i] for i in kept), *map(_kind, how.behind)]
    return _alone(spec, [*names], scores, kinds)


def _by_vocabulary(spec: Pieces, file: Path, config: Mapping[str, Any]) -> Pieces:
    """Returns M2M100's pieces, whose ids are those of vocab.json, with a token for each language at the end. Entries of
    vocab.json that are not pieces of the file are never matched in text."""
    source = file.with_name("vocab.json")
    if not source.is_file():
        raise DataError(
            f"{file}: vocab.json, with the ids of an M2M100 tokenizer, is missing from the folder"
        )
    vocabulary = bytelevel.read_vocabulary(source)
    need_tokens(bytelevel.ROBERTA, ("eos", "unk"), vocabulary, source)
    names = sorted(vocabulary, key=vocabulary.__getitem__)
    known = dict(zip(spec.pieces, zip(spec.scores, spec.kinds, strict=True), strict=True))
    absent = [piece for piece, (_, kind) in known.items() if kind == NORMAL and piece not in vocabulary]
    if absent or [vocabulary[name] for name in names] != [*range(len(names))]:
        mismatch = (
            f"lacks {len(absent)} of its pieces, such as {absent[0]!r}"
            if absent
            else "has gaps between its ids"
        )
        raise DataError(
            f"{file}: vocab.json {mismatch}; the two files are of different models, or one is damaged"
        )
    codes = config.get("language_codes", "m2m100")
    tables = {"m2m100": M2M100, "wmt21": WMT21}
    check_known(codes, tables, f"{file}: tokenizer_config.json has unknown language_codes", error=DataError)
    rows = [known[name] if name not in FAIRSEQ and name in known else (LOWEST, UNUSED) for name in names]
    kinds = [_kind(name) if name in FAIRSEQ else kind for name, (_, kind) in zip(names, rows, strict=True)]
    languages = [f"__{code}__" for code in tables[codes]]
    scores = [score for score, _ in rows] + [0.0] * len(languages)
    return _alone(spec, [*names, *languages], scores, [*kinds, *(CONTROL for _ in languages)])


def _alone(spec: Pieces, pieces: list[str], scores: list[float], kinds: list[int]) -> Pieces:
    """Returns these pieces, which split text as `spec` does, without a template of their own."""
    mask = "<mask>" if "<mask>" in pieces else None
    changes: dict[str, Any] = {"unk": pieces.index("<unk>"), "bos": None, "eos": None, "absorbing": mask}
    return replace(spec, pieces=pieces, scores=scores, kinds=kinds, **changes)


def _kind(name: str) -> int:
    return UNKNOWN if name == "<unk>" else CONTROL
