"""BERT's `vocab.txt`: one WordPiece a line; vocabularies with words (RoFormer, WoBERT) are recognized."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from headway.errors import DataError

NAMES = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
# Models whose vocab.txt is cut by rules other than BERT's.
OTHERS = {"mpnet", "funnel", "bertjapanese", "bertweet", "phobert", "herbert", "splinter", "cpm", "markuplm"}
HAN = r"[\u3400-\u4dbf\u4e00-\u9fff]"


@dataclass(frozen=True)
class Rules:
    """How text is prepared before it is cut (BERT, section 3; google-research/bert, tokenization.py).

    lower: lower case. accents: None strips accents where letters are lowered. chinese: each Chinese character is a
    word of its own.
    """

    lower: bool
    accents: bool | None = None
    chinese: bool = True


def read_vocabulary(path: Path) -> dict[str, int]:
    """Piece -> line number, from 0. Raises DataError for no pieces, for a piece on two lines and for what is not
    UTF-8."""
    try:
        lines = path.read_bytes().decode("utf-8").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text, one piece a line: {error}") from None
    if lines[-1] == "":
        lines.pop()
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


def rules(vocabulary: Mapping[str, int], config: Mapping[str, Any], path: Path) -> Rules:
    """The rules of `tokenizer_config.json`; where it has none for case, a vocabulary with capital letters keeps
    them, and one without is lower-cased. Raises DataError for what cannot be done."""
    if config.get("do_basic_tokenize") is False:
        raise DataError(
            f"{path}: do_basic_tokenize is false; text that is not cut into words is not supported"
        )
    words = [piece for piece in vocabulary if len(re.findall(HAN, piece)) > 1]
    if words:
        raise DataError(
            f"{path}: {len(words)} pieces are Chinese words, such as {words[0]!r}: RoFormer's and WoBERT's text is cut "
            "into words by the frequencies of jieba's dictionary, which this file does not hold, and cut into "
            "characters those ids would never occur; train a vocabulary with headway.text.train_words"
        )
    capitals = any(
        re.search("[A-Z]", piece) for piece in vocabulary if not re.fullmatch(r"\[.*\]|<.*>", piece)
    )
    lower = config.get("do_lower_case", not capitals)
    return Rules(bool(lower), config.get("strip_accents"), bool(config.get("tokenize_chinese_chars", True)))


def build(vocabulary: dict[str, int], names: Mapping[str, str], rules: Rules, path: Path) -> Backend:
    """The `tokenizers` form. `names`: the special tokens by role (see NAMES).

    One text is [CLS] a [SEP], two are [CLS] a [SEP] b [SEP] with token type 1 from b on. Raises DataError when a
    special token that is needed is not a piece.
    """
    for role in ("unk", "cls", "sep"):
        if names[role] not in vocabulary:
            raise DataError(
                f"{path}: the {role} token {names[role][:80]!r} is not among its {len(vocabulary)} pieces"
            )
    backend = Backend(models.WordPiece(vocabulary, unk_token=names["unk"]))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=rules.chinese,
        strip_accents=rules.accents,
        lowercase=rules.lower,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.add_special_tokens(
        [AddedToken(n, special=True, normalized=False) for n in names.values() if n in vocabulary]
    )
    cls, sep = names["cls"], names["sep"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, vocabulary[cls]), (sep, vocabulary[sep])],
    )
    return backend
