"""The oracles of segments of conversations: renderings of `transformers`, and the answers in them."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from headway.errors import DataError
from headway.text import ChatTemplate, Tokenizer
from headway.text.chat import Message
from tests.data import data_path
from tests.text.conftest import byte_level, sentencepiece
from tests.text.templates import found_templates, in_parts, with_controls
from tests.text.test_chat import CHAT, LLAMA2, TURNS

MARKED = re.compile(r"\{%-?\s*generation")
OWN = {"turns": ChatTemplate(TURNS), "llama2, not marked": ChatTemplate(LLAMA2)}
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "llama2": lambda: Tokenizer.load(data_path("tokenizers/llama2")),
    "llama3": lambda: Tokenizer.load(data_path("tokenizers/llama3")),
    # takes away double and outer spaces
    "squeezes": lambda: Tokenizer.load(data_path("tokenizers/open_llama_3b")),
}


@cache
def prepared(
    kind: str, all_of_them: bool
) -> tuple[Tokenizer, dict[str, tuple[Tokenizer, bool, frozenset[int]]]]:
    """Returns a tokenizer with every control token and, by template, a copy that has it, whether it wants parts, and
    its stop tokens."""
    templates = OWN | found_templates(all_of_them=all_of_them)
    tokenizer = with_controls(KINDS[kind](), list(templates.values()))
    tokenizer.encode_pieces([])  # makes what all copies share
    by_template = {}
    for name, template in templates.items():
        copy = tokenizer.with_chat_template(template.source)
        wants_parts = "sat on" not in shown(copy, CHAT[:2])
        chats = [in_parts(c) if wants_parts else c for c in (CHAT[:2], [*CHAT, CHAT[1]])]
        stops = set()
        for chat in chats:
            for ids in copy.encode_pieces(copy.chat_pieces(chat, strict=False))[1::2]:
                stops |= {*[i for i in ids if i in copy.special_ids][-1:]}
        by_template[name] = copy, wants_parts, frozenset(stops)
    return tokenizer, by_template


def shown(tokenizer: Tokenizer, chat: Sequence[Message]) -> str:
    try:
        return tokenizer.decode(tokenizer.render_chat(chat, add_generation_prompt=False), special=True)
    except DataError:
        return ""


def expected(
    tokenizer: Tokenizer, chat: Sequence[Message], stops: frozenset[int]
) -> tuple[str, list[str]] | None:
    """Returns the rendering of `transformers`, and its answers up to their last stop token: those that its own tracker
    of generation marks finds, or without marks those between renderings; None if renderings do not begin with one
    another."""
    from transformers.utils.chat_template_utils import render_jinja_template

    assert tokenizer.chat_template is not None
    source = tokenizer.chat_template.source
    names = {
        "bos_token": tokenizer.token(tokenizer.need("bos")), "eos_token": tokenizer.token(tokenizer.need("eos"))
    }  # fmt: skip

    def render(messages: Sequence[Message], prompt: bool = False, mask: bool = False) -> tuple[str, Any]:
        texts, spans = render_jinja_template(
            [list(messages)],
            chat_template=source,
            add_generation_prompt=prompt,
            return_assistant_tokens_mask=mask,
            **names,
        )
        return texts[0], spans[0] if mask else None

    if MARKED.search(source):
        text, spans = render(chat, mask=True)
    else:
        text, spans = render(chat)[0], []
        for i, message in enumerate(chat):
            if message["role"] == "assistant":
                before, after = render(chat[:i], prompt=True)[0], render(chat[: i + 1])[0]
                if not (text.startswith(after) and after.startswith(before)):
                    return None
                spans.append((len(before), len(after)))
    answers: list[str] = []
    last = -1
    for begin, end in spans:
        if begin == last:
            answers[-1] += text[begin:end]
        else:
            answers.append(text[begin:end])
        last = end
    ends = "|".join(re.escape(tokenizer.token(i)) for i in stops) or "(?!)"
    return text, [re.match(rf"(?s).*(?:{ends})|", answer)[0] for answer in answers]  # type: ignore[index]


def comparable(kind: str, tokenizer: Tokenizer, text: str) -> str:
    """Returns a text as far as tokenizers agree on it: SentencePiece writes a space of its own after a control token,
    and has one name for two kinds of space; what its normalizer takes away is gone from both texts."""
    if kind == "squeezes":
        text = tokenizer.decode(tokenizer.encode(text, bos=False, eos=False))
    return text if kind in ("byte_level", "llama3") else re.sub("[ \u2581]", "", text)
