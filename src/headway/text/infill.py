"""Fill in the middle: prompts that ask a model for the text between a prefix and a suffix.

<|fim_prefix|> before <|fim_suffix|> behind <|fim_middle|> requested text
(Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle".)
"""

from collections.abc import Sequence

from headway.errors import DataError
from headway.text.tokenizer import Tokenizer

BEFORE, BEHIND = "before", "behind"
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
"""By model family: the tokens before the prefix, the suffix and the middle."""
FORMS = (*((a, BEFORE, b, BEHIND, c) for a, b, c in MARKS), ("[SUFFIX]", BEHIND, "[PREFIX]", BEFORE))
FILE = "<|file_sep|>"
"""The token before another file, if the vocabulary has it."""


def infill(
    tokenizer: Tokenizer, before: str, behind: str, files: Sequence[tuple[str, str]] = ()
) -> list[int]:
    """Returns the ids that request the text between two others, after other files (name, text). Raises DataError if the
    vocabulary has no tokens for that."""
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    texts = {BEFORE: before, BEHIND: behind}
    form = next((form for form in FORMS if vocabulary.keys() >= {*form} - {BEFORE, BEHIND}), None)
    if form is None:
        names = ", ".join(form[0] for form in FORMS)
        raise DataError(
            f"fill-in-the-middle: the vocabulary has none of the tokens {names}; leave out the suffix"
        )
    ids = tokenizer.encode("", eos=False)
    for name, text in files:
        is_marked = FILE in vocabulary
        head = f"{name}\n" if is_marked else "\n\n--- snippet ---\n\n"
        ids += [*([vocabulary[FILE]] if is_marked else []), *tokenizer.encode(head + text, bos=False)]
    for part in form:
        ids += tokenizer.encode(texts[part], bos=False) if part in texts else [vocabulary[part]]
    return ids
