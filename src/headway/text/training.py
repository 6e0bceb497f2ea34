"""Training of tokenizers: byte-level BPE, and Chinese tokenizers by characters and by words.

Chinese text takes fewer tokens if words are tokens. A text is split into the words whose probabilities have the
greatest product, assuming that words are independent: a unigram model, solved by dynamic programming over the positions
of the text (Kudo 2018, section 3.2; jieba without its hidden Markov model does the same with a dictionary's
frequencies). Words that are not in the vocabulary fall back to characters, and characters that are not in it to UTF-8
bytes, so that every text is decoded exactly.
"""

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from headway.errors import ConfigError
from headway.text.bytelevel import put_rule
from headway.text.rules import RULES
from headway.text.sentencepiece import breaker, digits
from headway.text.template import BARE, Template
from headway.text.tokenizer import Tokenizer
from headway.text.tokenizer_config import CLASSLESS
from headway.text.vocabulary import add_controls
from headway.text.wordpiece import HAN

BOS, EOS = "<|begin|>", "<|end|>"
SPECIALS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
RESERVED = [*SPECIALS.values(), *(f"<0x{byte:02X}>" for byte in range(256))]
# No word crosses from Chinese into another script, into punctuation, or beyond a space before a word.
LEAST, LONGEST = 3, 4
CUT = r"\p{Han}+| ?[^\s\p{Han}\p{P}\p{S}]+| ?[\p{P}\p{S}]|\s"


def train_bpe(texts: Iterable[str], vocab_size: int, *, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Trains a byte-level BPE of `vocab_size` ids: BOS 0, EOS 1, `special_tokens`, 256 bytes, then merges.

    Every string can be encoded and is decoded exactly (there is no unknown token). The result is a function of the
    multiset of texts: neither their order nor the number of threads changes it. `texts` is read once, so it may be a
    generator over a corpus larger than memory (word counts are kept, not the text).
    Raises ConfigError if `vocab_size` has no room for the special tokens and the 256 bytes; warns if the texts are too
    few to fill it.
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
    put_rule(backend, RULES["llama-bpe"])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=reserved,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    _warn_fewer("train_bpe", backend, vocab_size, ": there was nothing left to merge")
    backend.post_processor = BARE.beginning(0, True).processor(backend)
    return Tokenizer(backend, bos=0, eos=1, config={**CLASSLESS, "bos_token": BOS, "eos_token": EOS})


def train_characters(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a tokenizer whose tokens are the most frequent characters of `texts`.

    Ids: [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4, 256 bytes, then characters, the most frequent first (ties by code
    point). Template: [CLS] a [SEP] b [SEP].
    Raises ConfigError if `vocab_size` has no room for a character.
    """
    room = _room("train_characters", vocab_size)
    counts = Counter(character for text in texts for character in text)
    return _tokenizer("train_characters", _most(counts, room), vocab_size)


def train_words(
    texts: Iterable[str], vocab_size: int, *, dictionary: Mapping[str, int] | None = None
) -> Tokenizer:
    """Trains a tokenizer whose tokens are words and characters of `texts`; ids and template as in `train_characters`.

    All characters are kept while there is room, the most frequent first; the remaining ids go to the most frequent
    words, with their counts in `texts` as frequencies. With a `dictionary` (word -> number of occurrences anywhere) the
    texts are split by it, as jieba splits them for RoFormer and WoBERT. Without one, words are found in the texts:
    starting from all frequent runs of 2 to 4 Chinese characters and whole words of other scripts, the texts are split
    and words recounted repeatedly, keeping fewer words each time (expectation maximisation with the best split in place
    of the expectation).

    The result is a function of the multiset of texts. Memory grows with the number of different stretches of text
    between punctuation, not with the number of texts.
    Raises ConfigError if `vocab_size` has no room for a character, or the dictionary is empty.
    """
    room = _room("train_words", vocab_size)
    if dictionary is not None and not dictionary:
        raise ConfigError("train_words: the dictionary is empty; give words with their frequencies, or None")
    cut = pre_tokenizers.Split(Regex(CUT), "isolated").pre_tokenize_str
    stretches = Counter(stretch for text in texts for stretch, _ in cut(text))
    character_counts: Counter[str] = Counter()
    for stretch, n in stretches.items():
        for character in stretch:
            character_counts[character] += n
    singles = _most(character_counts, room)
    room -= len(singles)
    words = _seeds(stretches) if dictionary is None else {w: n for w, n in dictionary.items() if len(w) > 1}
    for share in (4, 2, 1, 1) if dictionary is None else (1,):
        counts = _count(stretches, {**singles, **words})
        words = _most({word: counts[word] for word in words if counts[word]}, share * room)
    counts = _count(stretches, {**singles, **words})
    weights = {piece: counts[piece] or 1 for piece in (*singles, *words)}
    return _tokenizer("train_words", _most(weights, len(weights)), vocab_size)


def _room(what: str, vocab_size: int) -> int:
    if vocab_size <= len(RESERVED):
        raise ConfigError(
            f"{what}: vocab_size {vocab_size} is too small: {len(SPECIALS)} special tokens and 256 bytes need "
            f"{len(RESERVED)}, and characters come after them"
        )
    return vocab_size - len(RESERVED)


def _most(counts: Mapping[str, int], room: int) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:room])


def _seeds(stretches: Mapping[str, int]) -> dict[str, int]:
    """Returns the runs of 2 to LONGEST Chinese characters and the words of other scripts that occur LEAST times or
    more. A run can be that frequent only if its sub-runs are."""
    chinese = {s: n for s, n in stretches.items() if re.match(HAN, s)}
    words = {s: n for s, n in stretches.items() if s not in chinese and n >= LEAST and len(s) > 1}
    shorter: Mapping[str, int] | None = None
    for length in range(2, LONGEST + 1):
        runs: Counter[str] = Counter()
        for stretch, n in chinese.items():
            for i in range(len(stretch) - length + 1):
                run = stretch[i : i + length]
                if shorter is None or (run[1:] in shorter and run[:-1] in shorter):
                    runs[run] += n
        shorter = {run: n for run, n in runs.items() if n >= LEAST}
        words |= shorter
    return words


def _count(stretches: Mapping[str, int], weights: Mapping[str, int]) -> Counter[str]:
    """Returns how often each piece occurs in the best splits of the stretches."""
    backend = _backend(weights)
    by_id: Counter[int] = Counter()
    todo = iter(stretches.items())
    while batch := list(islice(todo, 10_000)):
        cuts = backend.encode_batch_fast([stretch for stretch, _ in batch], add_special_tokens=False)
        for cut, (_, n) in zip(cuts, batch, strict=True):
            for i in cut.ids:
                by_id[i] += n
    return Counter({str(backend.id_to_token(i)): n for i, n in by_id.items()})


def _backend(weights: Mapping[str, int]) -> Backend:
    total = sum(weights.values())
    scored = [(name, 0.0) for name in RESERVED]
    scored += [(piece, digits(math.log(n / total))) for piece, n in weights.items() if piece not in RESERVED]
    backend = Backend(models.Unigram(scored, RESERVED.index(SPECIALS["unk"]), byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [breaker(RESERVED), pre_tokenizers.Split(Regex(CUT), "isolated")]
    )
    return backend


def _tokenizer(what: str, weights: Mapping[str, int], vocab_size: int) -> Tokenizer:
    backend = _backend(weights)
    _warn_fewer(what, backend, vocab_size)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    add_controls(backend, SPECIALS.values())
    cls, sep = (RESERVED.index(SPECIALS[role]) for role in ("cls", "sep"))
    backend.post_processor = Template.bert(cls, sep).processor(backend)
    return Tokenizer(backend, config=CLASSLESS)


def _warn_fewer(what: str, backend: Backend, vocab_size: int, why: str = "") -> None:
    got = backend.get_vocab_size()
    if got < vocab_size:
        warnings.warn(f"{what}: the texts gave {got} tokens, not {vocab_size}{why}", stacklevel=4)
