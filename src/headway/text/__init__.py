"""Text to ids and back: tokenizers, their training, chat templates, and decoding one token at a time."""

from headway.text.chat import ChatTemplate
from headway.text.files import first_file
from headway.text.infill import infill
from headway.text.marian import MarianTokenizer
from headway.text.template import Encoded
from headway.text.tokenizer import Tokenizer
from headway.text.training import train_bpe, train_characters, train_words
from headway.text.vocabulary import StreamDecoder

__all__ = [
    "ChatTemplate",
    "Encoded",
    "MarianTokenizer",
    "StreamDecoder",
    "Tokenizer",
    "first_file",
    "infill",
    "train_bpe",
    "train_characters",
    "train_words",
]
