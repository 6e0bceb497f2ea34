"""Text on disk to rows of tokens: reading, encoding, memory-mapped token files, packing, masking, order."""

from headway.data.encode import Corpus, encode_corpus
from headway.data.masking import Masking
from headway.data.order import Order, Place, order
from headway.data.packing import Batch, PackedRow, Rows, Span, apart, pack
from headway.data.reading import Piece, read_text, texts
from headway.data.template_rows import HELD_OUT, FramedRows, MaskedRows
from headway.data.tokenfile import TokenFile, TokenFileWriter

__all__ = [
    "HELD_OUT",
    "Batch",
    "Corpus",
    "FramedRows",
    "MaskedRows",
    "Masking",
    "Order",
    "PackedRow",
    "Piece",
    "Place",
    "Rows",
    "Span",
    "TokenFile",
    "TokenFileWriter",
    "apart",
    "encode_corpus",
    "order",
    "pack",
    "read_text",
    "texts",
]
