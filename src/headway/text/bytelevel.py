"""Byte-level BPE: `vocab.json` with `merges.txt` (GPT-2, RoBERTa, StarCoder, Qwen2), `encoder.json` with `vocab.bpe`
(as OpenAI published GPT-2), and tiktoken's ranks."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, processors
from tokenizers import Tokenizer as Backend

from headway.errors import DataError
from headway.text.rules import RULES, Rule
from headway.text.template import BARE
from headway.text.tokenizer_config import decoded, is_id, need_tokens, read_json, short, token_names
from headway.text.vocabulary import LARGEST_ID, add_controls, byte_level_alphabet

ROBERTA = {
    "bos": "<s>",
    "eos": "</s>",
    "cls": "<s>",
    "sep": "</s>",
    "unk": "<unk>",
    "pad": "<pad>",
    "mask": "<mask>",
}
GPT2 = {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "unk": "<|endoftext|>"}


@dataclass(frozen=True)
class Style:
    """How one kind of tokenizer treats text.

    Attributes:
        kinds: model types and tokenizer classes of this style, in lower case without punctuation.
        special: special tokens by role, unless a config names others.
        rule: the name of its rule in `rules.RULES`.
        template: whether it has RoBERTa's template, <s> a </s> and <s> a </s></s> b </s>; the others have none.
    """

    kinds: frozenset[str]
    special: Mapping[str, str]
    rule: str = "gpt-2"
    template: bool = False


PLAIN = Style(frozenset({"gpt2", "gptneo", "gptj", "codegen"}), GPT2)
WITH_TEMPLATE = Style(
    frozenset({"roberta", "longformer", "bart", "led", "camembert", "robertaprelayernorm"}),
    ROBERTA,
    template=True,
)
STYLES = (
    PLAIN,
    WITH_TEMPLATE,
    Style(frozenset({"gptbigcode", "starcoder2", "starcoder"}), GPT2, "starcoder"),
    Style(
        frozenset({"qwen2", "qwen2moe", "qwen3", "qwen3moe"}),
        {"eos": "<|endoftext|>", "pad": "<|endoftext|>"},
        "qwen2",
    ),
)


def put_rule(backend: Backend, rule: Rule, space: bool = False) -> None:
    """Sets the rule by which a tokenizer splits text, and the byte-level decoder."""
    if rule.normalizer is not None:
        backend.normalizer = rule.normalizer
    backend.pre_tokenizer, backend.decoder = rule.split(space), decoders.ByteLevel()


def style_of(kind: str, vocabulary: Mapping[str, int], path: Path) -> Style:
    """Returns the style of a model type or tokenizer class; without either, RoBERTa's if its special tokens are in the
    vocabulary, else GPT-2's. Raises DataError for a kind whose text is split by other rules."""
    if not kind:
        return WITH_TEMPLATE if all(name in vocabulary for name in ROBERTA.values()) else PLAIN
    for style in STYLES:
        if kind in style.kinds:
            return style
    known = ", ".join(sorted(kind for style in STYLES for kind in style.kinds))
    raise DataError(
        f"{path}: vocab.json with merges.txt of kind {kind!r} is not supported (supported kinds: {known}); "
        "put the tokenizer.json of the same model into the folder"
    )


def read_vocabulary(path: Path) -> dict[str, int]:
    """Returns piece -> id. Raises DataError for any other content, and for a repeated id."""
    pieces = read_json(path)
    if not pieces or not all(map(is_id, pieces.values())):
        raise DataError(
            f'{path}: an object from pieces to ids is expected, like {{"the": 0}}, with ids below {LARGEST_ID:,}'
        )
    owner: dict[int, str] = {}
    for piece, i in pieces.items():
        if i in owner:
            raise DataError(f"{path}: two pieces have the id {i}, {owner[i]!r} and {piece!r}")
        owner[i] = piece
    return pieces


def read_merges(path: Path, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns the pairs, most important first. Raises DataError, with the line, for a line that is not a pair of pieces
    and for pieces that the vocabulary lacks."""
    lines = decoded(path).replace("\r\n", "\n").split("\n")
    merges = []
    for number, line in enumerate(lines, 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = tuple(line.split(" "))
        if len(pair) != 2:
            raise DataError(
                f"{path}: line {number}: expected two pieces separated by a space, got {short(line)}"
            )
        for piece in (*pair, "".join(pair)):
            if piece not in vocabulary:
                raise DataError(
                    f"{path}: line {number} merges {short(pair[0])} and {short(pair[1])}, but {short(piece)} is not in "
                    "the vocabulary: the two files belong to different tokenizers"
                )
        merges.append((pair[0], pair[1]))
    return merges


MERGES = {"encoder.json": "vocab.bpe"}
"""The file names of merges, by that of the vocabulary; merges.txt for all others."""


def merges_of(vocabulary: Path) -> Path:
    """Returns the path of the merges that belong to a vocabulary file."""
    return vocabulary.with_name(MERGES.get(vocabulary.name, "merges.txt"))


def read(file: Path, config: Mapping[str, Any], kind: str) -> tuple[Backend, dict[str, str | None]]:
    """Returns the `tokenizers` form of a vocabulary and its merges, and its special tokens by role."""
    merges = merges_of(file)
    if not merges.is_file():
        raise DataError(f"{file}: {merges.name}, with the BPE merges, is missing from the folder")
    vocabulary = read_vocabulary(file)
    style = style_of(kind, vocabulary, file)
    backend = Backend(models.BPE(vocabulary, read_merges(merges, vocabulary)))
    names, space = token_names(config, style.special), bool(config.get("add_prefix_space", False))
    put_rule(backend, RULES[style.rule], space)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    if style.template:
        roles = "cls", "sep"
        cls, sep = zip(
            (str(names[r]) for r in roles), need_tokens(names, roles, vocabulary, file), strict=True
        )
        trim = bool(config.get("trim_offsets", True))
        backend.post_processor = processors.RobertaProcessing(
            sep, cls, trim_offsets=trim, add_prefix_space=space
        )
    specials = {name for name in names.values() if name is not None and name in vocabulary}
    # a mask replaces a word with its leading space
    backend.add_special_tokens(
        [AddedToken(n, special=True, normalized=False, lstrip=n == names.get("mask"))
         for n in sorted(specials, key=vocabulary.__getitem__)]
    )  # fmt: skip
    return backend, names


def read_ranks(path: Path) -> list[bytes]:
    """Reads tiktoken's file: "BASE64 RANK" per line, ranks from 0 in order. Raises DataError with the first malformed
    line, and if one of the 256 bytes has no rank."""
    ranks: list[bytes] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            word, rank = line.split()
            token = base64.b64decode(word, validate=True)
            if int(rank) != len(ranks) or not token:
                raise ValueError(f"expected rank {len(ranks)}")
        except (ValueError, binascii.Error) as error:
            raise DataError(
                f"{path}: line {number}: not tiktoken's format (base64 and rank): {error}"
            ) from None
        ranks.append(token)
    if len(set(ranks)) != len(ranks):
        raise DataError(f"{path}: the same token has two ranks")
    missing = set(range(256)) - {t[0] for t in ranks if len(t) == 1}
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of the 256 bytes have no rank; the file is truncated or of another kind"
        )
    return ranks


def llama3_specials() -> list[str]:
    """Returns Llama 3's 256 control tokens, which follow its ranks in this order (meta-llama/llama3, tokenizer.py).

    Llama 3.1 gives six of the reserved ones other names, with the same ids for those that Llama 3 uses.
    """
    names = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(4))]
    names += ["<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"]
    return names + [f"<|reserved_special_token_{i}|>" for i in range(5, 256 - 5)]


def build_ranks(ranks: list[bytes], specials: list[str]) -> Backend:
    """Returns Llama 3's tokenizer: each text begins with the first of `specials`.

    tiktoken merges the adjacent pair whose joint token has the least rank: the merges are all splits of every token in
    two, least rank first; a piece of text that is a token as a whole is taken as it is.
    """
    of_byte = {byte: char for char, byte in byte_level_alphabet().items()}
    names = ["".join(map(of_byte.__getitem__, token)) for token in ranks]
    rank_of = {name: i for i, name in enumerate(names)}
    merges: list[tuple[str, str]] = []
    for name in names:
        cuts = ((name[:i], name[i:]) for i in range(1, len(name)))
        pairs = [(a, b) for a, b in cuts if a in rank_of and b in rank_of]
        merges += sorted(pairs, key=lambda cut: (rank_of[cut[0]], rank_of[cut[1]]))
    backend = Backend(models.BPE(rank_of, merges, ignore_merges=True))
    put_rule(backend, RULES["llama-bpe"])
    add_controls(backend, specials)
    backend.post_processor = BARE.beginning(len(ranks), True).processor(backend)
    return backend
