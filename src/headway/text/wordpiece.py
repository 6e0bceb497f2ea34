"""BERT's `vocab.txt`: one WordPiece per line; vocabularies with Chinese words (RoFormer, WoBERT) are refused."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from headway.errors import DataError
from headway.text.template import Template
from headway.text.tokenizer_config import decoded, need_tokens, token_names
from headway.text.vocabulary import add_controls

NAMES = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
# Models whose vocab.txt is split by rules other than BERT's.
OTHERS = {"mpnet", "funnel", "bertjapanese", "bertweet", "phobert", "herbert", "splinter", "cpm", "markuplm"}
HAN = r"[\u3400-\u4dbf\u4e00-\u9fff]"


def read_vocabulary(path: Path) -> dict[str, int]:
    """Returns piece -> line number, from 0. Raises DataError for a file without pieces, for a repeated piece and for
    text that is not UTF-8."""
    lines = decoded(path).replace("\r\n", "\n").removesuffix("\n").split("\n")
    if not any(lines):
        raise DataError(f"{path}: no pieces; one is expected on each line")
    vocabulary: dict[str, int] = {}
    for i, piece in enumerate(lines):
        if piece in vocabulary:
            raise DataError(
                f"{path}: lines {vocabulary[piece] + 1} and {i + 1} are the same piece {piece[:80]!r}; its id would be "
                "ambiguous"
            )
        vocabulary[piece] = i
    return vocabulary


def normalizer(
    vocabulary: Mapping[str, int], config: Mapping[str, Any], path: Path
) -> normalizers.Normalizer:
    """Returns the normalization before text is split (BERT, section 3; google-research/bert, tokenization.py).

    It follows `tokenizer_config.json`. Without a setting for case, text is lower-cased unless the vocabulary has
    capital letters; without one for accents, they are stripped if text is lower-cased. Each Chinese character is a word
    of its own unless the config says otherwise. Raises DataError for unsupported settings and vocabularies."""
    if config.get("do_basic_tokenize") is False:
        raise DataError(f"{path}: do_basic_tokenize=false (text is not split into words) is not supported")
    words = [piece for piece in vocabulary if len(re.findall(HAN, piece)) > 1]
    if words:
        raise DataError(
            f"{path}: {len(words)} pieces are Chinese words, such as {words[0]!r}: RoFormer's and WoBERT's "
            "tokenizers split text by the word frequencies of jieba's dictionary, which this file does not hold; "
            "train a tokenizer with headway.text.train_words"
        )
    capitals = any(
        re.search("[A-Z]", piece) for piece in vocabulary if not re.fullmatch(r"\[.*\]|<.*>", piece)
    )
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
        lowercase=bool(config.get("do_lower_case", not capitals)),
    )


def read(file: Path, config: Mapping[str, Any], kind: str) -> tuple[Backend, dict[str, str | None]]:
    """Returns the `tokenizers` form of a `vocab.txt`, with BERT's template, and its special tokens by role.

    Raises DataError for a `kind` with other rules, and if a required special token is not a piece."""
    if kind in OTHERS:
        raise DataError(
            f"{file}: a vocab.txt of kind {kind!r} is not supported, because its rules are not BERT's; put the "
            "tokenizer.json of the same model into the folder"
        )
    vocabulary, names = read_vocabulary(file), token_names(config, NAMES)
    return build(vocabulary, names, config, file), names


def build(
    vocabulary: Mapping[str, int], names: Mapping[str, str | None], config: Mapping[str, Any], file: Path
) -> Backend:
    """Returns the `tokenizers` form of a vocabulary, given the names of its special tokens by role and the config that
    `normalizer` reads; raises as `read`."""
    prepare = normalizer(vocabulary, config, file)
    _, cls, sep = need_tokens(names, ("unk", "cls", "sep"), vocabulary, file)
    backend = Backend(models.WordPiece(dict(vocabulary), unk_token=str(names["unk"])))
    backend.normalizer = prepare
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    add_controls(backend, [name for name in names.values() if name is not None and name in vocabulary])
    backend.post_processor = Template.bert(cls, sep).processor(backend)
    return backend
