"""How byte-level tokenizers split a text before BPE merges it, by the names of these rules in GGUF.

The patterns are those of the tokenizers' own files, as ggml-org/llama.cpp, src/llama-vocab.cpp, quotes them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

# Words with their leading space, numbers in groups of three digits, punctuation, line ends; runs of spaces stay whole
# except for the last space (Llama 3's rule, from its tokenizer.py). Qwen2's differs in that every digit is separate.
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPLIT = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPLIT_DIGITS = SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
SPLIT_MARKS = SPLIT_DIGITS.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"\s\p{L}\p", r"\s\p{L}\p{M}\p")
"""Qwen 3.5's rule, in which combining marks belong to their letters."""
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SPLIT_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""GPT-4o's rule: a capital letter after small letters begins a new word."""
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
HAN, LINE = "[一-龥ࠀ-一가-퟿]+", "[\r\n]"
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def split_by(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Returns a pre-tokenizer that splits text by each pattern in turn, every match a piece of its own, and then into
    bytes."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def digits_apart(space: bool) -> pre_tokenizers.PreTokenizer:
    """Returns GPT-2's rule with every digit separate; `space`: texts begin with a space."""
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=space)]
    )


@dataclass(frozen=True)
class Rule:
    """How text is split before it is merged.

    Attributes:
        split: makes the pre-tokenizer; its argument is whether a text begins with a space.
        normalizer: normalizer of the text, if any.
        whole: whether a part that is a token as a whole is taken without merging.
        bos: whether texts begin with BOS, unless a GGUF file says otherwise.
    """

    split: Callable[[bool], pre_tokenizers.PreTokenizer]
    normalizer: normalizers.Normalizer | None = None
    whole: bool = False
    bos: bool = False


def _by(*patterns: str, nfc: bool = False, whole: bool = False, bos: bool = False) -> Rule:
    return Rule(lambda space: split_by(*patterns), normalizers.NFC() if nfc else None, whole, bos)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
        _by(SPLIT, whole=True, bos=True),
    ),
    "glm4": _by(SPLIT, whole=True),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _by(SPLIT)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _by(SPLIT_DIGITS, nfc=True)),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _by(SPLIT_DIGITS)),
    "qwen35": _by(SPLIT_MARKS, nfc=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _by(SPLIT_CASE)),
    "tekken": _by(SPLIT_CASE.replace(f"{CONTRACTIONS}?", "").replace("{1,3}", ""), whole=True, bos=True),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "mellum", "exaone4"), Rule(pre_tokenizers.ByteLevel)),
    **dict.fromkeys(("olmo", "mpt", "modern-bert"), Rule(pre_tokenizers.ByteLevel, normalizers.NFC())),
    **dict.fromkeys(
        ("starcoder", "smollm", "refact", "codeshell", "exaone", "minerva-7b"), Rule(digits_apart)
    ),
    "command-r": Rule(digits_apart, normalizers.NFC()),
    "falcon": _by(r"[\p{P}\$\+<=>\^~\|`]+", GPT2_WORDS, "[0-9][0-9][0-9]"),
    "deepseek-llm": _by(
        LINE, r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", HAN, r"\p{N}"
    ),
    "deepseek-coder": _by(LINE, r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _by(*DEEPSEEK_V3)),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), _by(r" ?[^(\s|.,!?…。，、।۔،)]+")),
}
"""Rules by their names in GGUF's tokenizer.ggml.pre; of equal rules the first name is written."""
