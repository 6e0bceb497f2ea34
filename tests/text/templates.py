"""Chat templates for the tests, a tokenizer with their control tokens, and conversations that try to break them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken

from headway.text import ChatTemplate, Tokenizer
from headway.text.chat import BUILT_IN, Message

CONTROL = re.compile(
    r"<[|｜][^<>{}'\"\s]{1,40}[|｜]?>|<[a-z_]{2,20}_of_[a-z]{2,12}>|<[a-z]{2,12}[|]>|</?think>"
)
WORDS = [
    "", " ", "\n", "\n\n", "  ", "yes", "no.", " x", "naïve", "猫狗", "🙂", "e\u0301", "▁", "\u200b", "hw", "#1;", "<|",
    "|>", "{{ bos_token }}", "{% generation %}", "USER:", "ASSISTANT: ", "[INST]", " [/INST]", "### Response:", "</s>",
    "<s>", "<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "<end_of_turn>\n", "<think>", "</think>",
    "<｜Assistant｜>",
]  # fmt: skip
SAID = st.lists(st.sampled_from(WORDS), max_size=5).map("".join)


@st.composite
def conversations(draw: st.DrawFn, words: st.SearchStrategy[str] = SAID) -> list[dict[str, str]]:
    """Draws rounds of user and assistant, perhaps with a system message before and an open question at the end."""
    messages = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages += [{"role": "user", "content": draw(words)}, {"role": "assistant", "content": draw(words)}]
    return messages + ([{"role": "user", "content": draw(words)}] if draw(st.integers(0, 3)) == 0 else [])


def found_templates(*, all_of_them: bool) -> dict[str, ChatTemplate]:
    """Returns the built-in templates, with `all_of_them` those of TRL, too."""
    templates = {name: ChatTemplate.find(name) for name in BUILT_IN}
    if all_of_them:
        import trl

        files = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
        templates |= {file.stem: ChatTemplate.find(file) for file in files}
    return templates


def with_controls(tokenizer: Tokenizer, templates: Sequence[ChatTemplate]) -> Tokenizer:
    """Returns the tokenizer with every name in the templates that looks like a control token added as one."""
    names = sorted({name for template in templates for name in CONTROL.findall(template.source)})
    thinks = [
        AddedToken(name, special=False, normalized=False) for name in names if "think" in name
    ]  # as Qwen has them
    tokenizer.backend.add_tokens(thinks)
    tokenizer.backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in names if "think" not in name]
    )
    return Tokenizer(tokenizer.backend, bos=tokenizer.bos, eos=tokenizer.eos, config=tokenizer.config)


def in_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns the same messages with their content in parts, as some templates want it."""
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
