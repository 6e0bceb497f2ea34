"""Writes a tokenizer as the keys of a GGUF file (`headway.text.gguf` reads them), if they can express it exactly."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from headway.errors import DataError
from headway.text.gguf import BYTE_LEVEL, GGML, MODEL, PIECES, ROLES, TEMPLATE, pairs_of, read
from headway.text.rules import RULES
from headway.text.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from headway.text.template import Template
from headway.text.vocabulary import BYTE_PIECE, Vocabulary, steps_of

MODEL_FLAGS = (
    "unk_token",
    "byte_fallback",
    "ignore_merges",
    "dropout",
    "continuing_subword_prefix",
    "end_of_word_suffix",
)


def write(vocabulary: Vocabulary, template: Template, chat_template: str | None, rows: int) -> dict[str, Any]:
    """Returns the GGUF keys of a tokenizer for a model whose embedding has `rows` rows; `read` of them is the same
    tokenizer.

    Raises DataError, naming what GGUF has no key for: tokenizers that are not BPE, other rules to split or normalize
    text, tokens that absorb spaces around them, templates that add other tokens than BOS and EOS."""
    backend = vocabulary.backend
    vocabulary.require_fits(rows)
    byte_level = [step["type"] for step in steps_of(backend.decoder)] == ["ByteLevel"]
    model = json.loads(backend.to_str())["model"]
    if model["type"] != "BPE":
        raise DataError(f"GGUF can store BPE tokenizers only; this tokenizer is of type {model['type']}")
    ends = {"bos": vocabulary.bos, "eos": vocabulary.eos}
    if template.prefix not in ((), (vocabulary.bos,)) or template.suffix not in ((), (vocabulary.eos,)):
        raise DataError(
            "GGUF cannot store this tokenizer's template, which adds tokens other than BOS and EOS"
        )
    tokens, kinds = _listed(vocabulary, rows, byte_level)
    merges = pairs_of(model["merges"])
    flags = {"add_bos_token": bool(template.prefix), "add_eos_token": bool(template.suffix)}
    roles = {name: getattr(vocabulary, role) for role, name in ROLES.items()}
    metadata: dict[str, Any] = {
        MODEL: BYTE_LEVEL if byte_level else PIECES,
        f"{GGML}pre": _rule_of(backend) if byte_level else "default",
        f"{GGML}tokens": tokens,
        f"{GGML}token_type": kinds,
        **{f"{GGML}{name}_token_id": i for name, i in {**ends, **roles}.items() if i is not None},
        **{f"{GGML}{name}": value for name, value in flags.items()},
    }
    if byte_level:
        metadata[f"{GGML}merges"] = [" ".join(pair) for pair in merges]
    else:
        metadata[f"{GGML}scores"] = _scores(tokens, merges)
        metadata[f"{GGML}add_space_prefix"] = any(
            step["type"] == "Prepend" for step in _flat(backend.normalizer)
        )
    if chat_template is not None:
        metadata[TEMPLATE] = chat_template
    original, reread = _essence(backend), _essence(read(metadata, Path("the file"))[0])
    if lost := [part for part in original if original[part] != reread[part]]:
        raise DataError(
            f"GGUF cannot express this tokenizer's {', '.join(lost)}: pass another file of the same tokenizer, such as "
            "SentencePiece's (--tokenizer FOLDER/tokenizer.model), or convert a copy of the folder without a tokenizer"
        )
    return metadata


def _listed(vocabulary: Vocabulary, rows: int, byte_level: bool) -> tuple[list[str], list[int]]:
    """Returns the texts and types of `rows` ids."""
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


def _scores(tokens: list[str], merges: list[tuple[str, str]]) -> list[float]:
    """Returns scores by which SentencePiece, which merges the best-scoring pair first, makes the same merges.

    A piece's score is minus the rank of its merges; pieces whose merges alternate in the list share one score, since
    merges of equal score alternate by position."""
    pieces = ["".join(pair) for pair in merges]
    last = {piece: i for i, piece in enumerate(pieces)}
    scores: dict[str, float] = {}
    end = place = -1
    # pieces x y x z: x and y alternate and share 0, z has -1
    for i, piece in enumerate(pieces):
        place += i > end
        end = max(end, last[piece])
        scores[piece] = -float(place)
    return [scores.get(token, 0.0) for token in tokens]


def _rule_of(backend: Backend) -> str:
    """Returns the name of the rule by which a byte-level tokenizer splits text. Raises DataError if no known rule
    matches."""
    whole = backend.model.ignore_merges
    for name, rule in RULES.items():
        steps, known = (backend.pre_tokenizer, backend.normalizer), (rule.split(False), rule.normalizer)
        if whole == rule.whole and [*map(_flat, steps)] == [*map(_flat, known)]:
            return name
    raise DataError(f"this tokenizer's pre-tokenizer has no known name in GGUF; known are {', '.join(RULES)}")


def _flat(component: Any) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer or pre-tokenizer, without settings that only change offsets."""
    state = None if component is None else json.loads(component.__getstate__())
    steps = [] if state is None else state.get("normalizers", state.get("pretokenizers", [state]))
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]


def _essence(backend: Backend) -> dict[str, Any]:
    """Returns the parts of a tokenizer that determine the ids of a text; consecutive merges into the same piece are
    unordered."""
    state = json.loads(backend.to_str())
    model, flat = state["model"], _flat(backend.normalizer)
    added = {token["content"]: token for token in state["added_tokens"]}
    merges: list[tuple[str, set[tuple[str, str]]]] = []
    for pair in pairs_of(model["merges"]):
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
