"""The calls that the chat templates of llama.cpp's sources write are read back, whole and cut anywhere: what a template
writes for a message with calls is what its model should write."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headway.errors import DataError
from headway.serve.bodies import Chat
from headway.serve.formats import find_format
from headway.serve.markup import Part
from headway.serve.tools import Prepared
from headway.text import Tokenizer
from tests.data import llama_cpp_path
from tests.serve.calls import calls_of, merged
from tests.text.conftest import byte_level

pytestmark = pytest.mark.slow
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where"},
        "days": {"type": "integer", "description": "How many"},
        "units": {"type": "array", "items": {"type": "string"}, "description": "Which"},
        "opts": {"type": "object", "additionalProperties": {"type": "boolean"}, "description": "More"},
    },
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "description": "Time", "parameters": NOTHING}},
]
CALLS = [
    ("get_weather", {"city": 'São "P" <b>', "days": 2, "units": ["c", "f"], "opts": {"x": True}}),
    ("now", {}),
]
THOUGHT, TEXT = "Hm.\nSo.", "Let me look."
REFUSED = {
    "Kimi-K2-Instruct": "attribute 'append' of 'list' object is unsafe",
    "Kimi-K2-Thinking": "attribute 'append' of 'list' object is unsafe",
    "google-gemma-2-2b-it": "System role not supported",
    "llama-cpp-deepseek-r1": "Object of type generator is not JSON serializable",
}
"""Templates that write no functions or no calls in the sandbox, with their errors (transformers gives them, too)."""
ASKED_AS_HERMES = {
    "HuggingFaceTB-SmolLM3-3B": "its functions are told by a variable of its own, and earlier calls are not written",
    "llama-cpp-rwkv-world": "knows no functions",
    "meetkai-functionary-medium-v3.2": "every message begins with a line of its own, whom it is for",
    "microsoft-Phi-3.5-mini-instruct": "knows no functions",
}
ONE_CALL = {"GigaChat3", "meta-llama", "openai-gpt-oss"}
"""Templates that write only one call of a message."""
NO_TEXT = {"NVIDIA-Nemotron-Nano-v2", "google-gemma-4", "openai-gpt-oss"}
"""Templates that write text beside calls in another way: behind them, as reasoning, or as a message of its own."""

INSTRUCTS = "CohereForAI-c4ai-command-r-plus-tool_use"
"""This template writes how to call behind all messages, between question and answer."""


@cache
def plain() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.encode_pieces([])  # builds the tables that all copies share
    return tokenizer


def prepared(tokenizer: Tokenizer, *messages: dict[str, Any]) -> tuple[Prepared, str]:
    """Returns a chat and its prompt by the template; without `messages`, the prompt ends where the answer begins."""
    chat = Prepared(Chat(messages=[{"role": "user", "content": "go"}, *messages], tools=TOOLS), tokenizer)  # type: ignore[arg-type]
    assert tokenizer.chat_template is not None
    options = {
        "bos_token": "",
        "eos_token": "<|eos|>",
        "add_generation_prompt": not messages,
        **chat.variables,
    }
    return chat, tokenizer.chat_template.render(chat.messages, **options)


def answer(file: Path) -> tuple[Prepared, str, int]:
    """Returns a chat, what the model answers when it calls, and the number of these calls."""
    tokenizer = plain().with_chat_template(file)
    count = 1 if any(map(file.stem.startswith, ONE_CALL)) else 2
    text = "" if any(map(file.stem.startswith, NO_TEXT)) else TEXT
    calls = [
        {
            "id": f"abcdefgh{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for i, (name, arguments) in enumerate(CALLS[:count])
    ]
    thoughts = dict.fromkeys(("reasoning_content", "reasoning"), THOUGHT)
    _, whole = prepared(tokenizer, {"role": "assistant", "content": text, "tool_calls": calls, **thoughts})
    chat, prompt = prepared(tokenizer)
    if file.stem == INSTRUCTS:
        return chat, whole.rpartition("<|CHATBOT_TOKEN|>")[2].partition("<|START_OF_TURN_TOKEN|>")[0], count
    head = prompt.rstrip()
    if (marks := chat.marks) is None:
        assert whole.startswith(prompt)
        return chat, whole.removeprefix(prompt), count
    open, close = marks.open.strip(), marks.close.strip()
    opened, closed = head.endswith(open), head.endswith(close)
    head = head.removesuffix(close).rstrip().removesuffix(open).rstrip()
    assert whole.startswith(head)
    written = whole.removeprefix(head).lstrip()
    if opened:
        written = written.removeprefix(open)
        return chat, written if close in written else f"{close}{written}", count
    return chat, written.removeprefix(close) if closed else written, count


def read(chat: Prepared, *pieces: str) -> list[Part]:
    reader = chat.reader()
    parts = [part for piece in pieces for part in reader.push(piece, last=False)]
    return merged([*parts, *reader.push("", last=True)])


def templates() -> list[Path]:
    return sorted(llama_cpp_path("models/templates").glob("*.jinja"))


def test_every_published_template_writes_calls_in_a_form_that_is_known() -> None:
    chats = {
        file.stem: prepared(plain().with_chat_template(file))[0]
        for file in templates()
        if file.stem not in REFUSED
    }
    unknown = {name for name, chat in chats.items() if find_format(chat._source) is None}
    assert unknown == ASKED_AS_HERMES.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_published_template_refuses_it_refuses_by_name(name: str) -> None:
    with pytest.raises(DataError, match=REFUSED[name]):
        answer(llama_cpp_path(f"models/templates/{name}.jinja"))


def test_calls_that_published_templates_write_are_read_cut_anywhere() -> None:
    wrong = {}
    for file in templates():
        if file.stem in REFUSED or file.stem in ASKED_AS_HERMES:
            continue
        chat, text, count = answer(file)
        parts = read(chat, text)
        kinds = [part.kind for part in parts]
        before = parts[: kinds.index("call")] if "call" in kinds else parts
        texts = {
            kind: "".join(part.text for part in before if part.kind == kind).strip()
            for kind in ("reasoning", "text")
        }
        expected = {
            "reasoning": THOUGHT if THOUGHT in text else "",
            "text": TEXT if TEXT in text else "",
        }
        if calls_of(parts) != CALLS[:count] or texts != expected:
            wrong[file.stem] = text, parts
            continue
        cuts = [(text[:i], text[i:]) for i in range(1, len(text))]
        if any(read(chat, *pieces) != parts for pieces in (text, *cuts)):
            wrong[file.stem] = text, "other parts where it is cut"
    assert not wrong
