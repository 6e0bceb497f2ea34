"""The tokenizer in GGUF's metadata: SentencePiece's pieces with scores ("llama"), byte-level BPE with merges ("gpt2").

    tokenizer.ggml.tokens       texts, by id
    tokenizer.ggml.token_type   SentencePiece's types: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte
    tokenizer.ggml.scores       of "llama"
    tokenizer.ggml.merges       "left right", of "gpt2"
    tokenizer.ggml.pre          by which rule "gpt2" splits a text first: `RULES`
    tokenizer.ggml.add_bos_token, add_eos_token, add_space_prefix, bos_token_id, eos_token_id, ...
    tokenizer.chat_template

Rows of the embedding without a token are unused tokens named [PAD0], [PAD1], ..., which are left out here.
(ggml-org/ggml, docs/gguf.md; ggml-org/llama.cpp, src/llama-vocab.cpp.)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headway.errors import DataError, did_you_mean
from headway.text import sentencepiece
from headway.text.bytelevel import SPLIT, split_by
from headway.text.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Pieces
from headway.text.template import Template
from headway.text.tokenizer_config import CLASSLESS, is_id
from headway.text.vocabulary import BYTE_PIECE, Vocabulary, add_controls, steps_of

MAGIC = b"GGUF"
GGML = "tokenizer.ggml."
MODEL, TEMPLATE = f"{GGML}model", "tokenizer.chat_template"
PIECES, BYTE_LEVEL = "llama", "gpt2"
NONE = ("none", "no_vocab")
"""Kinds of a file without a tokenizer."""
MODEL_FLAGS = (
    "unk_token",
    "byte_fallback",
    "ignore_merges",
    "dropout",
    "continuing_subword_prefix",
    "end_of_word_suffix",
)
ROLES = {"unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
"""Special tokens by role, and the beginning of their key."""


@dataclass(frozen=True)
class Rule:
    """How "gpt2" splits a text before it merges. Where `whole`, a part that is a token is taken as it is; where `bos`,
    texts begin with BOS unless the file says otherwise."""

    split: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    whole: bool = False
    bos: bool = False


_DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
_LLAMA3 = Rule(split_by(SPLIT), whole=True, bos=True)
RULES: Mapping[str, Rule] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": Rule(split_by(SPLIT)),
    "smaug-bpe": Rule(split_by(SPLIT)),
    "qwen2": Rule(split_by(SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")), normalizers.NFC()),
    "gpt-2": Rule(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "starcoder": Rule(_DIGITS),
    "smollm": Rule(_DIGITS),
}
"""By tokenizer.ggml.pre; of equal ones the first is written."""


def read(metadata: Mapping[str, Any], file: Path) -> tuple[Backend, dict[str, Any]]:
    """The tokenizer of a file in its `tokenizers` form, and what `Tokenizer` takes besides.

    Raises DataError, naming the key, for a kind or a rule that is unknown, and for lists that do not fit together."""
    kind = metadata.get(MODEL)
    if not has_tokenizer(metadata):
        raise DataError(f"{file}: this file has no tokenizer ({MODEL} is {kind!r}); give one from elsewhere")
    readers = {PIECES: _read_pieces, BYTE_LEVEL: _read_byte_level}
    if kind not in readers:
        raise DataError(
            f"{file}: {MODEL} is {kind!r}, which is unsupported; supported are {', '.join(readers)}"
        )
    tokens, kinds = _tokens(metadata)
    ids = {
        role: _id(metadata, name, len(tokens)) for role, name in {"bos": "bos", "eos": "eos", **ROLES}.items()
    }
    backend, begins = readers[kind](metadata, tokens, kinds, ids)
    given = {key: metadata.get(f"{GGML}{key}_token") for key in ("add_bos", "add_eos")}
    for key, value in given.items():
        if value is not None and not isinstance(value, bool):
            raise DataError(f"{GGML}{key}_token must be true or false, got {value!r}")
    template = metadata.get(TEMPLATE)
    if template is not None and not isinstance(template, str):
        raise DataError(f"{TEMPLATE} must be text, got {str(template)[:80]}")
    return backend, {
        "bos": ids.pop("bos"),
        "eos": ids.pop("eos"),
        "special": {role: i for role, i in ids.items() if i is not None},
        "begins_with_bos": begins if given["add_bos"] is None else given["add_bos"],
        "ends_with_eos": bool(given["add_eos"]),
        "chat_template": template,
        "config": dict(CLASSLESS),
    }


def has_tokenizer(metadata: Mapping[str, Any]) -> bool:
    """Whether a file holds a tokenizer, of whatever kind."""
    return metadata.get(MODEL) is not None and metadata[MODEL] not in NONE


def write(vocabulary: Vocabulary, template: Template, chat_template: str | None, rows: int) -> dict[str, Any]:
    """The keys of a tokenizer for a model whose embedding has `rows` rows; `read` of them is the same tokenizer.

    Raises DataError, naming what GGUF has no key for: tokenizers that are no BPE, other rules to split or normalize
    text, tokens that take spaces around them, templates that add other tokens than BOS and EOS."""
    backend = vocabulary.backend
    vocabulary.require_fits(rows)
    byte_level = [step["type"] for step in steps_of(backend.decoder)] == ["ByteLevel"]
    model = json.loads(backend.to_str())["model"]
    if model["type"] != "BPE":
        raise DataError(f"GGUF holds tokenizers of BPE, and this is {model['type']}")
    ends = {"bos": vocabulary.bos, "eos": vocabulary.eos}
    if template.prefix not in ((), (vocabulary.bos,)) or template.suffix not in ((), (vocabulary.eos,)):
        raise DataError(
            "this tokenizer's template adds other tokens than BOS and EOS, for which GGUF has no key"
        )
    tokens, kinds = _listed(vocabulary, rows, byte_level)
    merges = _pairs(model["merges"])
    flags = {"add_bos_token": bool(template.prefix), "add_eos_token": bool(template.suffix)}
    roles = {name: getattr(vocabulary, role) for role, name in ROLES.items()}
    found: dict[str, Any] = {
        MODEL: BYTE_LEVEL if byte_level else PIECES,
        f"{GGML}pre": _rule_of(backend) if byte_level else "default",
        f"{GGML}tokens": tokens,
        f"{GGML}token_type": kinds,
        **{f"{GGML}{name}_token_id": i for name, i in {**ends, **roles}.items() if i is not None},
        **{f"{GGML}{name}": value for name, value in flags.items()},
    }
    if byte_level:
        found[f"{GGML}merges"] = [" ".join(pair) for pair in merges]
    else:
        found[f"{GGML}scores"] = _scores(tokens, merges)
        found[f"{GGML}add_space_prefix"] = any(
            step["type"] == "Prepend" for step in _flat(backend.normalizer)
        )
    if chat_template is not None:
        found[TEMPLATE] = chat_template
    ours, theirs = _essence(backend), _essence(read(found, Path("the file"))[0])
    if lost := [part for part in ours if ours[part] != theirs[part]]:
        raise DataError(
            f"GGUF cannot express this tokenizer's {', '.join(lost)}: give another file of the same tokenizer, such as "
            "SentencePiece's (--tokenizer FOLDER/tokenizer.model), or convert a copy of the folder without a tokenizer"
        )
    return found


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Texts and types by id, without the padding at the end."""
    tokens, kinds = metadata.get(f"{GGML}tokens"), metadata.get(f"{GGML}token_type")
    if not isinstance(tokens, list) or not all(isinstance(token, str) and token for token in tokens):
        raise DataError(f"{GGML}tokens must be a list of texts, none of them empty, got {str(tokens)[:80]}")
    kinds = [NORMAL] * len(tokens) if kinds is None else list(kinds)
    if len(kinds) != len(tokens) or not set(kinds) <= {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}:
        raise DataError(f"{GGML}token_type must list a type from 1 to 6 for each of {len(tokens):,} tokens")
    if len(set(tokens)) != len(tokens):
        raise DataError(f"{GGML}tokens lists the same text twice")
    while tokens and _is_padding(len(tokens) - 1, tokens[-1], kinds[-1]):
        tokens, kinds = tokens[:-1], kinds[:-1]
    return tokens, kinds


def _is_padding(i: int, token: str, kind: int) -> bool:
    return kind == UNUSED and token == f"[PAD{i}]"


def _id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    value = metadata.get(f"{GGML}{name}_token_id")
    if value is not None and (not is_id(value) or value >= count):
        raise DataError(
            f"{GGML}{name}_token_id must be the id of one of {count:,} tokens, got {str(value)[:80]}"
        )
    return value


def _read_pieces(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], ids: Mapping[str, int | None]
) -> tuple[Backend, bool]:
    scores = list(metadata.get(f"{GGML}scores", ()))[: len(tokens)]
    if len(scores) != len(tokens) or not all(
        isinstance(score, float) and isfinite(score) for score in scores
    ):
        raise DataError(f"{GGML}scores must list a number for each of {len(tokens):,} tokens")
    unknown = (
        ids["unk"] if ids["unk"] is not None else next((i for i, k in enumerate(kinds) if k == UNKNOWN), 0)
    )
    flags = {
        "dummy_prefix": ("add_space_prefix", True),
        "squeeze_spaces": ("remove_extra_whitespaces", False),
    }
    given = {name: metadata.get(f"{GGML}{key}", usual) for name, (key, usual) in flags.items()}
    if not all(isinstance(value, bool) for value in given.values()):
        raise DataError(f"{' and '.join(f'{GGML}{key}' for key, _ in flags.values())} must be true or false")
    pieces = Pieces(
        tokens,
        scores,
        kinds,
        unk=unknown,
        bos=ids["bos"],
        eos=ids["eos"],
        byte_fallback=BYTE in kinds,
        **given,
    )
    return sentencepiece.build(pieces), True


def _read_byte_level(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], ids: Mapping[str, int | None]
) -> tuple[Backend, bool]:
    name = metadata.get(f"{GGML}pre")
    if name not in RULES:
        raise DataError(
            f"{GGML}pre is {str(name)[:80]!r}{did_you_mean(str(name), RULES)}: the rule by which it splits text is not "
            f"known; known are {', '.join(RULES)}"
        )
    rule = RULES[name]
    there = {i: token for i, token in enumerate(tokens) if not _is_padding(i, token, kinds[i])}
    added = [i for i in there if kinds[i] in (CONTROL, UNKNOWN, USER_DEFINED)]
    count = len(there) - len(added)
    behind = added == [*range(count, len(there))]  # where they fall when they are added
    vocab = {token: i for i, token in there.items() if not behind or i < count}
    pairs = _pairs(metadata.get(f"{GGML}merges", ()))
    if odd := next(
        (pair for pair in pairs if not vocab.keys() >= {*pair, "".join(pair)} or len(pair) != 2), None
    ):
        raise DataError(
            f"{GGML}merges has {' '.join(odd)[:80]!r}, and its parts and what it makes are not all tokens"
        )
    backend = Backend(models.BPE(vocab, pairs, ignore_merges=rule.whole))
    if rule.normalizer is not None:
        backend.normalizer = rule.normalizer
    backend.pre_tokenizer, backend.decoder = rule.split, decoders.ByteLevel()
    for i in added:
        if kinds[i] == USER_DEFINED:
            backend.add_tokens([AddedToken(tokens[i], normalized=False)])
        else:
            add_controls(backend, [tokens[i]])
    return backend, rule.bos


def _pairs(merges: Iterable[Any]) -> list[tuple[str, ...]]:
    return [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]


def _listed(vocabulary: Vocabulary, rows: int, byte_level: bool) -> tuple[list[str], list[int]]:
    """Texts and types of as many ids."""
    names = {i: name for name, i in vocabulary.backend.get_vocab(with_added_tokens=True).items()}
    added = {i: token.special for i, token in vocabulary.backend.get_added_tokens_decoder().items()}

    def kind(i: int) -> int:
        if i not in names:
            return UNUSED
        if not byte_level and i == vocabulary.unk:
            return UNKNOWN
        if i in added:
            return CONTROL if added[i] else USER_DEFINED
        return BYTE if not byte_level and BYTE_PIECE.fullmatch(names[i]) else NORMAL

    return [names.get(i, f"[PAD{i}]") for i in range(rows)], [kind(i) for i in range(rows)]


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> list[float]:
    """SentencePiece merges what scores best: minus the place of the merges that make a piece, and one score for pieces
    whose merges alternate, as those of equal score do."""
    made = ["".join(pair) for pair in merges]
    last = {piece: i for i, piece in enumerate(made)}
    scores: dict[str, float] = {}
    end = place = -1
    for i, piece in enumerate(made):
        place += i > end
        end = max(end, last[piece])
        scores[piece] = -float(place)
    return [scores.get(token, 0.0) for token in tokens]


def _rule_of(backend: Backend) -> str:
    """The name of the rule by which a byte-level tokenizer splits text. Raises DataError where none is it."""
    whole = backend.model.ignore_merges
    for name, rule in RULES.items():
        same = _flat(backend.pre_tokenizer) == _flat(rule.split) and _flat(backend.normalizer) == _flat(
            rule.normalizer
        )
        if same and whole == rule.whole:
            return name
    raise DataError(
        f"this tokenizer splits text by a rule that GGUF has no name for here; known are {', '.join(RULES)}"
    )


def _flat(component: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, without what changes offsets alone."""
    state = None if component is None else json.loads(component.__getstate__())
    steps = [] if state is None else state.get("normalizers", state.get("pretokenizers", [state]))
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]


def _essence(backend: Backend) -> dict[str, Any]:
    """What decides the ids of a text, part by part; merges that make the same piece count as one."""
    state = json.loads(backend.to_str())
    model, flat = state["model"], _flat(backend.normalizer)
    added = {token["content"]: token for token in state["added_tokens"]}
    merges: list[tuple[str, set[tuple[str, ...]]]] = []
    for pair in _pairs(model["merges"]):
        if not merges or merges[-1][0] != "".join(pair):
            merges.append(("".join(pair), set()))
        merges[-1][1].add(pair)
    steps = steps_of(backend.decoder)
    flags = ("lstrip", "rstrip", "single_word", "special")
    return {
        "vocabulary": {piece: i for piece, i in model["vocab"].items() if piece not in added},
        "merges": merges,
        "model": {name: model.get(name) or None for name in MODEL_FLAGS},
        "added tokens": {
            name: (token["id"], *(token[flag] for flag in flags), bool(flat) and token["normalized"])
            for name, token in added.items()
        },
        "normalizer": flat,
        "rule to split text": _flat(backend.pre_tokenizer),
        "decoder": ["ByteLevel"] if [step["type"] for step in steps] == ["ByteLevel"] else steps,
    }
