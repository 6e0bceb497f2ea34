"""Reads the tokenizer in GGUF's metadata: SentencePiece's pieces with scores ("llama"; "t5": unigram) or merges
("gemma4"), byte-level BPE with merges ("gpt2"), and BERT's pieces ("bert", where a mark begins words instead of
continuations).

    tokenizer.ggml.tokens       texts, by id
    tokenizer.ggml.token_type   SentencePiece's types: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte
    tokenizer.ggml.scores       for "llama" and "t5"
    tokenizer.ggml.merges       "left right", for "gpt2" and "gemma4"
    tokenizer.ggml.pre          the rule by which "gpt2" splits a text first: `rules.RULES`
    tokenizer.ggml.add_bos_token, add_eos_token, add_space_prefix, bos_token_id, eos_token_id, ...
    tokenizer.chat_template, and tokenizer.chat_template.NAME

Rows of the embedding without a token are unused tokens named [PAD0], [PAD1], ..., which are left out here.
(ggml-org/ggml, docs/gguf.md; ggml-org/llama.cpp, src/llama-vocab.cpp.)
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from headway.errors import DataError, check_known
from headway.text import sentencepiece, wordpiece
from headway.text.bytelevel import put_rule
from headway.text.chat import one_template
from headway.text.rules import RULES
from headway.text.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Pieces
from headway.text.tokenizer_config import CLASSLESS, is_id
from headway.text.vocabulary import SPACE, add_controls

GGML = "tokenizer.ggml."
MODEL, TEMPLATE = f"{GGML}model", "tokenizer.chat_template"
PIECES, UNIGRAMS, MERGED, BYTE_LEVEL, WORDS = "llama", "t5", "gemma4", "gpt2", "bert"
NONE = ("none", "no_vocab")
"""Values of the model key in a file without a tokenizer."""
ROLES = {"unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask", "cls": "cls"}
"""Names of special tokens in GGUF's keys, by role."""


def read(metadata: Mapping[str, Any], file: Path) -> tuple[Backend, dict[str, Any]]:
    """Returns the `tokenizers` form of a file's tokenizer, and further arguments of `Tokenizer`.

    Raises DataError, naming the key, for an unknown kind or rule, and for lists that do not fit together."""
    kind = metadata.get(MODEL)
    if not has_tokenizer(metadata):
        raise DataError(f"{file}: the file holds no tokenizer ({MODEL} is {kind!r}); use another tokenizer")
    readers = {
        **dict.fromkeys((PIECES, UNIGRAMS, MERGED), _read_pieces),
        BYTE_LEVEL: _read_byte_level,
        WORDS: _read_words,
    }
    check_known(
        str(kind)[:80],
        readers,
        f"{file}: {MODEL} has the unsupported value",
        are="supported are",
        error=DataError,
    )
    tokens, kinds = _tokens(metadata)
    ids = {
        role: _id(metadata, name, len(tokens)) for role, name in {"bos": "bos", "eos": "eos", **ROLES}.items()
    }
    backend, begins = readers[str(kind)](metadata, tokens, kinds, ids)
    flags = {key: metadata.get(f"{GGML}{key}_token") for key in ("add_bos", "add_eos")}
    for key, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise DataError(f"{GGML}{key}_token must be true or false, got {value!r}")
    templates = {
        key[len(TEMPLATE) + 1 :]: metadata[key] for key in metadata if f"{key}.".startswith(f"{TEMPLATE}.")
    }
    for name, template in templates.items():
        if not isinstance(template, str):
            raise DataError(f"{TEMPLATE}{'.' * bool(name)}{name} must be text, got {str(template)[:80]}")
    return backend, {
        "bos": ids.pop("bos"),
        "eos": ids.pop("eos"),
        "special": {role: i for role, i in ids.items() if i is not None},
        "begins_with_bos": begins if flags["add_bos"] is None else flags["add_bos"],
        "ends_with_eos": kind == UNIGRAMS if flags["add_eos"] is None else flags["add_eos"],
        "chat_template": one_template({name or "default": template for name, template in templates.items()})
        if templates
        else None,
        "config": dict(CLASSLESS),
    }


def has_tokenizer(metadata: Mapping[str, Any]) -> bool:
    """Returns whether a file holds a tokenizer, of whatever kind."""
    return metadata.get(MODEL) is not None and metadata[MODEL] not in NONE


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Returns texts and types by id, without the padding at the end."""
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
    kind = metadata[MODEL]
    scores = list(metadata.get(f"{GGML}scores", [0.0] * len(tokens) if kind == MERGED else ()))[: len(tokens)]
    if len(scores) != len(tokens) or not all(
        isinstance(score, float) and isfinite(score) for score in scores
    ):
        raise DataError(f"{GGML}scores must list a number for each of {len(tokens):,} tokens")
    unknown = (
        ids["unk"] if ids["unk"] is not None else next((i for i, k in enumerate(kinds) if k == UNKNOWN), 0)
    )
    flags = _flags(metadata, add_space_prefix=kind != MERGED, remove_extra_whitespaces=False)
    charsmap = metadata.get(f"{GGML}precompiled_charsmap", ())
    if not all(isinstance(byte, int) and -128 <= byte < 256 for byte in charsmap):
        raise DataError(f"{GGML}precompiled_charsmap must list bytes")
    pieces = Pieces(
        tokens,
        scores,
        kinds,
        sentencepiece.UNIGRAM if kind == UNIGRAMS else sentencepiece.BPE,
        unk=unknown,
        bos=ids["bos"],
        eos=ids["eos"],
        byte_fallback=BYTE in kinds,
        dummy_prefix=flags["add_space_prefix"],
        squeeze_spaces=flags["remove_extra_whitespaces"],
        charsmap=bytes(byte & 255 for byte in charsmap),
        merges=pairs_of(metadata.get(f"{GGML}merges", ())) if kind == MERGED else None,
    )
    return sentencepiece.build(pieces), kind == PIECES


def _read_words(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], ids: Mapping[str, int | None]
) -> tuple[Backend, bool]:
    words = [
        token if kind == CONTROL else token[1:] if token.startswith(SPACE) else f"##{token}"
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    names = wordpiece.NAMES | {role: words[i] for role, i in ids.items() if i is not None and role in ROLES}
    flags = _flags(metadata, **{"normalizer.lowercase": True, "normalizer.strip_accents": True})
    config = dict(zip(("do_lower_case", "strip_accents"), flags.values(), strict=True))
    vocabulary = {word: i for i, word in enumerate(words)}
    return wordpiece.build(vocabulary, names, config, Path(f"{GGML}tokens")), False


def _flags(metadata: Mapping[str, Any], **usual: bool) -> dict[str, bool]:
    """Returns boolean keys, with their defaults if a file lacks them."""
    flags = {name: metadata.get(f"{GGML}{name}", value) for name, value in usual.items()}
    if not all(isinstance(value, bool) for value in flags.values()):
        raise DataError(f"{' and '.join(f'{GGML}{name}' for name in flags)} must be true or false")
    return flags


def _read_byte_level(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], ids: Mapping[str, int | None]
) -> tuple[Backend, bool]:
    if (name := metadata.get(f"{GGML}pre")) is None:
        raise DataError(
            f"{GGML}pre, the name of the pre-tokenizer, is missing, because the file was made by an old converter; "
            "convert the model again, or use the tokenizer of the original model"
        )
    check_known(
        str(name)[:80], RULES, f"{GGML}pre has the unsupported value", are="supported are", error=DataError
    )
    rule = RULES[str(name)]
    tokens_by_id = {i: token for i, token in enumerate(tokens) if not _is_padding(i, token, kinds[i])}
    added = [i for i in tokens_by_id if kinds[i] in (CONTROL, UNKNOWN, USER_DEFINED)]
    count = len(tokens_by_id) - len(added)
    behind = added == [*range(count, len(tokens_by_id))]  # the ids that added tokens get by default
    vocab = {token: i for i, token in tokens_by_id.items() if not behind or i < count}
    pairs = pairs_of(metadata.get(f"{GGML}merges", ()))
    if wrong_pair := next((pair for pair in pairs if not vocab.keys() >= {*pair, "".join(pair)}), None):
        raise DataError(
            f"{GGML}merges has {' '.join(wrong_pair)[:80]!r}, of which a part or the result is not a token"
        )
    backend = Backend(models.BPE(vocab, pairs, ignore_merges=rule.whole))
    put_rule(backend, rule)
    for i in added:
        if kinds[i] == USER_DEFINED:
            backend.add_tokens([AddedToken(tokens[i], normalized=False)])
        else:
            add_controls(backend, [tokens[i]])
    return backend, rule.bos


def pairs_of(merges: Iterable[Any]) -> list[tuple[str, str]]:
    """Returns merges as pairs, given as texts separated by a space or as lists. Raises DataError for anything else."""
    pairs = []
    for merge in merges:
        left, *rights = merge.split(" ") if isinstance(merge, str) else merge
        if len(rights) != 1:
            raise DataError(f"a merge must be two tokens separated by a space, got {str(merge)[:80]!r}")
        pairs.append((left, rights[0]))
    return pairs
