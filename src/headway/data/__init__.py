"""From text on disk to rows of tokens: reading, encoding, memory-mapped token files, packing, masking, shuffling."""

from headway.data.corpus import Piece, encode_corpus, read_text, texts
from headway.data.masking import Masking
from headway.data.order import Permutation, rows_from
from headway.data.rows import HELD_OUT, Batch, MaskedRows, PackedRow, Rows, Span, pack
from headway.data.tokenfile import TokenFile, TokenFileWriter

__all__ = [
    "HELD_OUT",
    "Batch",
    "MaskedRows",
    "Masking",
    "PackedRow",
    "Permutation",
    "Piece",
    "Rows",
    "Span",
    "TokenFile",
    "TokenFileWriter",
    "encode_corpus",
    "pack",
    "read_text",
    "rows_from",
    "texts",
]
