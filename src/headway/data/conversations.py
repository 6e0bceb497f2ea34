"""Parsers for the conversation formats of data sets (OpenAI, ShareGPT, Alpaca, ...), which return chat messages.

Their errors do not name the file and line of the record: callers add these."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headway.data.record_kinds import Messages
from headway.data.values import string
from headway.errors import DataError, as_error, check_known
from headway.text.chat import check_messages

# ShareGPT's names of speakers, as LLaMA-Factory and FastChat write them, and the roles of chat messages.
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip


def messages(value: Mapping[str, Any], key: str = "messages") -> Messages:
    """Returns the messages of a record in OpenAI's format: role and content."""
    turns = value[key]
    turns = [turns] if isinstance(turns, dict) else turns
    with as_error(DataError, f'"{key}"'):
        check_messages(turns)
    for i, message in enumerate(turns):
        content = message.get("content")
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            raise DataError(f'{key}[{i}]: "content" must be a string or a list, got {type(content).__name__}')
        if message.get("weight", 1) not in (0, 1):
            raise DataError(f'{key}[{i}]: "weight" must be 0 or 1, got {message["weight"]!r}')
    return tuple(turns)


def sharegpt(value: Mapping[str, Any], key: str = "conversations") -> Messages:
    """Returns the messages of a record in ShareGPT's format: turns with "from" and "value", and a "system" key beside
    them. Function calls become `tool_calls`."""
    turns = value[key]
    turns = [turns] if isinstance(turns, dict) else turns
    if not isinstance(turns, list) or not turns:
        raise DataError(f'"{key}" must be a non-empty list of turns, got {turns!r}')
    if all(isinstance(turn, dict) and "role" in turn for turn in turns):
        return (*_system(value), *messages(value, key))
    parsed = _system(value)
    for i, turn in enumerate(turns):
        at = f"{key}[{i}]"
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str) or "from" not in turn:
            raise DataError(f'{at} needs "from" and a string "value", got {turn!r}')
        speaker, text = turn["from"], turn["value"]
        check_known(speaker, ("function_call", *_ROLES), f"{at}: there is no speaker", error=DataError)
        if speaker == "function_call":
            parsed.append({"role": "assistant", "content": "", "tool_calls": _calls(text, at)})
        else:
            parsed.append({"role": _ROLES[speaker], "content": text})
    return tuple(parsed)


def alpaca(value: Mapping[str, Any]) -> Messages:
    """Returns the messages of a record in Alpaca's format; "history" holds earlier rounds. The content of the user's
    message is instruction and input; both are also kept under their own keys, for chat templates that read them."""
    instruction, extra = _text(value, "instruction"), _text(value, "input")
    earlier = _system(value)
    history = value.get("history") or []
    for i, turn in enumerate(history if isinstance(history, list) else [history]):
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise DataError(f"history[{i}] must be a list of a question and its answer, got {turn!r}")
        earlier += [_message("user", turn[0]), _message("assistant", turn[1])]
    content = f"{instruction}\n\n{extra}" if extra else instruction
    user = {"role": "user", "content": content, "instruction": instruction, "input": extra}
    return (*earlier, user, *([_message("assistant", _text(value, "output"))] if "output" in value else []))


def answered(value: Mapping[str, Any]) -> Messages:
    """Returns the messages of a record with a question and its answer."""
    return _message("user", _text(value, "question")), _message("assistant", _text(value, "answer"))


def completed(value: Mapping[str, Any]) -> Messages:
    """Returns the messages of a prompt and its completion, both lists of messages; the assistant's messages in the
    prompt are not trained."""
    prompt, completion = messages(value, "prompt"), messages(value, "completion")
    return (*({**m, "weight": 0} if m["role"] == "assistant" else m for m in prompt), *completion)


def preference(value: Mapping[str, Any]) -> tuple[Messages, Messages, Messages]:
    """Returns the messages of prompt, chosen and rejected. The prompt is what chosen and rejected both begin with or,
    if they do not repeat it, the messages under a key of its own ("prompt", "messages", ...)."""
    chosen, rejected = (_answer(value, key) for key in ("chosen", "rejected"))
    prompt = _prompt(value)
    # u1 a1 u2 | a2 and u1 a1 u2 | a3 share 3 messages; u1 | a1 u2 a2 and u1 | a1 a4 share 1: prompts end with no answer
    shared, shorter = 0, min(len(chosen), len(rejected))
    while shared < shorter and chosen[shared] == rejected[shared]:
        shared += 1
    while shared and (shared == shorter or chosen[shared - 1]["role"] == "assistant"):
        shared -= 1
    if not prompt or chosen[:shared][: len(prompt)] == prompt:
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not prompt:
        raise DataError(
            'the record has no prompt: add "prompt", or begin "chosen" and "rejected" with the same messages'
        )
    for key, turns in (("chosen", chosen), ("rejected", rejected)):
        if turns[0]["role"] != "assistant" or turns[-1]["role"] != "assistant":
            raise DataError(f'"{key}" must continue the prompt with an assistant message, and end with one')
    return prompt, chosen, rejected


def tools(value: Mapping[str, Any]) -> Sequence[Any] | None:
    """Returns the descriptions of functions (tools), which are a list or the JSON of one; None if there are none."""
    descriptions = value.get("tools") or None
    if isinstance(descriptions, str):
        descriptions = _json(descriptions, '"tools"')
    if descriptions is not None and not isinstance(descriptions, list):
        raise DataError(f'"tools" must be a list, got {type(descriptions).__name__}')
    return descriptions


def _answer(value: Mapping[str, Any], key: str) -> Messages:
    answer = value[key]
    if isinstance(answer, str):
        return (_message("assistant", answer),)
    wrapped = {key: [answer] if isinstance(answer, dict) else answer}
    first = wrapped[key][0] if isinstance(wrapped[key], list) and wrapped[key] else None
    return (sharegpt if isinstance(first, dict) and "from" in first else messages)(wrapped, key)


def _prompt(value: Mapping[str, Any]) -> Messages:
    if isinstance(value.get("prompt"), str):
        return (*_system(value), _message("user", value["prompt"]))
    for key, read in (("prompt", messages), ("messages", messages), ("conversations", sharegpt)):
        if key in value:
            return read(value, key)
    return alpaca(value) if "instruction" in value else ()


def _calls(text: str, place: str) -> list[dict[str, Any]]:
    calls = _json(text, f"{place}: a function_call")
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        if not isinstance(call, dict) or not {"name", "arguments"} <= call.keys():
            raise DataError(f'{place}: a function_call needs "name" and "arguments", got {call!r}')
    return [{"type": "function", "function": call} for call in calls]


def _json(text: str, what: str) -> Any:
    with as_error(DataError, f"{what} must be JSON", ValueError, RecursionError):
        return json.loads(text)


def _system(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [_message("system", text)] if (text := _text(value, "system")) else []


def _message(role: str, content: str) -> Mapping[str, Any]:
    return {"role": role, "content": content}


def _text(value: Mapping[str, Any], key: str) -> str:
    return "" if value.get(key) is None else string(value, key)
