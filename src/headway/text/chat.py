"""Chat templates: from messages to the text, and the ids, that a model was trained on."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headway.errors import DataError, did_you_mean

Message = Mapping[str, Any]


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is its
    body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


class ChatTemplate:
    """A Jinja chat template, as Hugging Face folders carry it, run in a sandbox."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals.update(
            raise_exception=_raise, strftime_now=lambda format: datetime.now().strftime(format)
        )
        self.source = source
        try:
            self._template = environment.from_string(source)
        except RecursionError:
            raise DataError("chat template: it is nested too deep") from None
        except TemplateError as error:
            raise DataError(f"chat template: line {getattr(error, 'lineno', '?')}: {error}") from None

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation.  `variables` are what the template may ask for (bos_token, tools, ...).

        Raises DataError when the template refuses them, with its own words.
        """
        try:
            return self._template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=add_generation_prompt, **variables
            )
        except TemplateError as error:
            raise DataError(f"chat template: {error}") from None
        except (TypeError, KeyError, AttributeError) as error:
            raise DataError(f"chat template: it failed on these messages: {error}") from None


class ControlTokens:
    """Control tokens of a conversation come from its template, never from a message.

    A message's text may contain what looks like a control token, and the template decides the order of everything. So
    the first character of each such place in a message is replaced by an unguessable escape; after rendering, what
    still matches a control token was written by the template and becomes a stand-in token of a private copy of the
    tokenizer, in which real control tokens are plain text.

    `specials`: the control tokens, name -> id.
    """

    def __init__(self, backend: Backend, specials: Mapping[str, int]) -> None:
        self._ids = dict(specials)
        self._key = f"hw{secrets.token_hex(8)}"
        names = sorted(specials, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, names)) if names else r"(?!)")
        self._backend = Backend.from_str(backend.to_str())
        self._backend.encode_special_tokens = True
        added = backend.get_added_tokens_decoder()
        stand_ins = {i: f"{self._key}#{i};" for i in specials.values()}
        self._backend.add_tokens(
            [AddedToken(name, special=False, normalized=False, lstrip=added[i].lstrip, rstrip=added[i].rstrip)
             for i, name in stand_ins.items()]
        )  # fmt: skip
        self._real = {int(self._backend.token_to_id(name) or 0): i for i, name in stand_ins.items()}

    def cover(self, value: Any) -> Any:
        """The same messages, in which no string holds a control token."""
        if isinstance(value, str):
            places = re.finditer(f"(?={self._controls.pattern})", value) if self._ids else ()
            for at in sorted((m.start() for m in places), reverse=True):
                value = f"{value[:at]}{self._key}{ord(value[at]):x};{value[at + 1 :]}"
            return value
        if isinstance(value, dict):
            return {k: self.cover(v) for k, v in value.items()}
        return [self.cover(v) for v in value] if isinstance(value, (list, tuple)) else value

    def ids(self, text: str) -> list[int]:
        """Ids of what the template made of covered messages."""
        text = self._controls.sub(lambda m: f"{self._key}#{self._ids[m[0]]};", text)
        text = re.sub(rf"{self._key}([0-9a-f]+);", lambda m: chr(int(m[1], 16)), text)
        return [self._real.get(i, i) for i in self._backend.encode(text, add_special_tokens=False).ids]


def check_messages(messages: Sequence[Message]) -> None:
    """Messages are a non-empty list of mappings with "role" and "content"; names the first that is not."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise DataError(
            'a chat is a list of messages like {"role": "user", "content": "..."}, '
            f"got {type(messages).__name__}"
        )
    if not messages:
        raise DataError("a chat needs at least one message, got an empty list")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(f"message {i} must be a mapping with role and content, got {message!r}")
        if not isinstance(message.get("role"), str):
            hint = did_you_mean("role", message)
            raise DataError(
                f'message {i} needs a "role" (system, user, assistant); its keys: {list(message)}{hint}'
            )
        if "content" not in message and "tool_calls" not in message:
            hint = did_you_mean("content", message)
            raise DataError(
                f'message {i} ({message["role"]}) needs "content"; its keys: {list(message)}{hint}'
            )
