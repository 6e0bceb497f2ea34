"""Training a byte-level BPE."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from headway.errors import ConfigError
from headway.text.bytelevel import SPLIT
from headway.text.tokenizer import Tokenizer

BOS, EOS = "<|begin|>", "<|end|>"


def train_bpe(texts: Iterable[str], vocab_size: int, *, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """A byte-level BPE of `vocab_size` ids: BOS 0, EOS 1, `special_tokens`, 256 bytes, then merges.

    Every string can be encoded and comes back exactly (there is no unknown token). The result is a function of
    the multiset of texts: neither their order nor the number of threads changes it. `texts` is read once, so
    it may be a generator over a corpus larger than memory (word counts are kept, not the text).
    Raises ConfigError when `vocab_size` has no room for the special tokens and the 256 bytes; warns when the
    texts are too few to fill it.
    """
    reserved = [BOS, EOS, *special_tokens]
    if len(set(reserved)) != len(reserved):
        raise ConfigError(f"train_bpe: special tokens must differ from each other, got {reserved}")
    least = len(reserved) + 256
    if vocab_size < least:
        raise ConfigError(
            f"train_bpe: vocab_size {vocab_size} is too small: {len(reserved)} special tokens and 256 bytes "
            f"need {least}"
        )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=reserved,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    got = backend.get_vocab_size()
    if got < vocab_size:
        warnings.warn(
            f"train_bpe: the texts gave {got} tokens, not {vocab_size}: there was nothing left to merge",
            stacklevel=2,
        )
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    config["clean_up_tokenization_spaces"] = False  # type: ignore[assignment]
    return Tokenizer(backend, bos=0, eos=1, config=config)
