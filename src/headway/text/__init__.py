"""Text to ids and back: tokenizers, their training, chat templates, and decoding one token at a time."""

from headway.text.chat import ChatTemplate
from headway.text.stream import StreamDecoder
from headway.text.tokenizer import Tokenizer
from headway.text.training import train_bpe

__all__ = ["ChatTemplate", "StreamDecoder", "Tokenizer", "train_bpe"]
