"""The words of which the texts here are made, and a tokenizer of them."""

from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headway.text import Tokenizer

WORDS = (
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("red", "green", "blue", "cat", "dog", "house", "the", "a", "sees"),
)


def words() -> Tokenizer:
    """A tokenizer of 24 words, of which the first five are special."""
    special = ["[UNK]", "<s>", "</s>", "[MASK]", "[PAD]"]
    names = [*special, *WORDS]
    backend = Backend(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(name, special=True) for name in special])
    return Tokenizer(backend, bos=1, eos=2, ends_with_eos=True)
