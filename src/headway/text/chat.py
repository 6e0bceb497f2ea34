"""Chat templates: from messages to the text and ids of a model's training format."""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headway.errors import DataError, as_error, did_you_mean

Message = Mapping[str, Any]
MOST_CHARACTERS, MOST_SECONDS = 1 << 24, 5.0
"""Bounds on rendering a conversation: characters of the text, and seconds."""
_FOLDER = files("headway.text") / "templates"
BUILT_IN = "alpaca", "chatml", "command-r", "llama2", "llama3", "vicuna"
REASONING = "reasoning_content", "thinking", "reasoning"
"""Keys of a message that may hold its reasoning."""


class _Generation(Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which marks the assistant's answers for training.

    Its body is output between two variables, which are empty unless marks are requested."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        body = nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))
        begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in _MARKS)
        return [begin, body, end]


_MARKS = "_generation_begin", "_generation_end"
_MARKED = re.compile(r"{%[-+]?\s*generation\b")


LAST_LINE_END = r"(\r\n|\r|\n)\Z"  # the line end that Jinja strips from the end of a template


class _TooLong(DataError):
    """The error for a template that wrote too much, or took too long."""


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


class ChatTemplate:
    """A Jinja chat template, as Hugging Face folders contain it, run in a sandbox.

    `name`: its name in errors; by default its first line. `marked`: whether it marks answers ({% generation %})."""

    def __init__(self, source: str, name: str | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals.update(
            raise_exception=_raise, strftime_now=lambda format: datetime.now().strftime(format)
        )
        self.source, self.marked = source, bool(_MARKED.search(source))
        self._marks = {name: f"<{secrets.token_hex(8)}>" for name in _MARKS}
        self._any_mark = re.compile("|".join(self._marks.values()))
        self.name = name or next((line.strip()[:60] for line in source.splitlines() if line.strip()), "")
        try:
            self._template = environment.from_string(source)
        except RecursionError:
            raise DataError("chat template: nested too deeply") from None
        except TemplateError as error:
            raise DataError(f"chat template: line {getattr(error, 'lineno', '?')}: {error}") from None

    @staticmethod
    def find(source: str | Path) -> "ChatTemplate":
        """Returns a built-in template (`BUILT_IN`) by name, or one from Jinja text or a file."""
        if source in BUILT_IN:
            return ChatTemplate((_FOLDER / f"{source}.jinja").read_text(encoding="utf-8"), str(source))
        if "{{" in str(source) or "{%" in str(source):
            return ChatTemplate(str(source))
        with as_error(DataError, f"chat template {str(source)[:80]}", OSError, UnicodeDecodeError):
            if Path(source).is_file():
                return ChatTemplate(Path(source).read_text(encoding="utf-8"), str(source))
        raise DataError(
            f"{source}: neither a built-in chat template{did_you_mean(str(source), BUILT_IN)}, nor a file or "
            f"Jinja; built in are {', '.join(BUILT_IN)}"
        )

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Returns the text of a conversation. `variables` are what the template may use (bos_token, tools, ...).

        Raises DataError with the template's own message if it refuses them, and if it writes too much or takes too
        long.
        """
        return self._rendered(
            messages, monotonic() + MOST_SECONDS, add_generation_prompt=add_generation_prompt, **variables
        )

    def _rendered(self, messages: Sequence[Message], until: float, **variables: Any) -> str:
        pieces, total = [], 0
        try:
            context = {"tools": None, "documents": None, **variables, "messages": [*map(_readable, messages)]}
            for piece in self._template.generate(context):
                pieces.append(piece)
                total += len(piece)
                if total > MOST_CHARACTERS or monotonic() > until:
                    raise _TooLong(
                        f"chat template: stopped after {total:,} characters for {len(messages)} messages; it may "
                        f"write at most {MOST_CHARACTERS:,} in {MOST_SECONDS:g} seconds; pass fewer or shorter messages"
                    )
            return "".join(pieces)
        except TemplateError as error:
            raise DataError(f"chat template: {error}") from None
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"chat template: failed on these messages: {error}") from None

    def pieces(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        strict: bool = True,
        **variables: Any,
    ) -> list[str]:
        """Returns the rendering split where answers begin and end: every second piece (1, 3, ..) is an answer.

        An answer is the text between generation marks of the template; answers with nothing between them are one.
        Without marks, answer i is render(messages[:i+1]) without its prefix render(messages[:i],
        add_generation_prompt=True). If that is not a prefix, it is unknown what a model would have generated: raises
        DataError if `strict`, else returns one piece.
        """

        until = monotonic() + MOST_SECONDS

        def rendered(prefix: Sequence[Message], **options: Any) -> str:
            return self._rendered(prefix, until, **variables, **options)

        if self.marked:
            text = rendered(messages, add_generation_prompt=add_generation_prompt, **self._marks)
            pieces = self._any_mark.split(text)
            if self._any_mark.findall(text) != [*self._marks.values()] * (len(pieces) // 2):
                raise self._refused("its {% generation %} marks are nested")
            return _joined(pieces)
        whole = rendered(messages, add_generation_prompt=add_generation_prompt)
        try:
            return self._differences(messages, whole, rendered)
        except DataError as error:
            if strict or isinstance(error, _TooLong):
                raise
            return [whole]

    def _differences(
        self, messages: Sequence[Message], whole: str, rendered: Callable[..., str]
    ) -> list[str]:
        pieces, at = [], 0
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = rendered(messages[:i], add_generation_prompt=True) if i else ""
                after = rendered(messages[: i + 1], add_generation_prompt=False)
                if not (whole.startswith(after) and after.startswith(before) and len(before) >= at):
                    raise self._refused(
                        f"its text for messages 0 to {i} is not the beginning of its text for all {len(messages)}, "
                        "so that the answers cannot be located"
                    )
                pieces += [whole[at : len(before)], whole[len(before) : len(after)]]
                at = len(after)
        return [*pieces, whole[at:]]

    def _refused(self, reason: str) -> DataError:
        return DataError(
            f"chat template {self.name!r}: {reason}; use a template with {{% generation %}} marks around answers"
        )


def _readable(message: Message) -> dict[str, Any]:
    """Returns a message in the form that templates expect (transformers, `apply_chat_template`): without keys that are
    null, and with its reasoning as "reasoning_content" and as "thinking", which gpt-oss and LFM2.5 read."""
    read = {key: value for key, value in message.items() if value is not None}
    reasoning = next((read[key] for key in REASONING if key in read), None)
    return read if reasoning is None else {"thinking": reasoning, **read, "reasoning_content": reasoning}


def one_template(named: Mapping[str, str]) -> str:
    """Combines named templates into one that chooses among them as transformers does: by the variable `chat_template`,
    else "tool_use" if there are tools, else "default". The tags {%+, +%} keep whitespace at their ends."""
    if named.keys() == {"default"}:
        return named["default"]
    conditions, text = {"tool_use": "tools is defined and tools is not none", "default": "true"}, ""
    for name in sorted(named, key=lambda name: (name == "default", name)):
        condition = f"chat_template == {json.dumps(name, ensure_ascii=False)}"
        condition += f" or chat_template is not defined and {conditions[name]}" if name in conditions else ""
        text += f"{{%+ {'elif' if text else 'if'} {condition} +%}}{re.sub(LAST_LINE_END, '', named[name])}"
    refusal = f"chat_template names none of this tokenizer's templates: {', '.join(sorted(named))}"
    return f"{text}{{%+ else %}}{{{{ raise_exception({json.dumps(refusal, ensure_ascii=False)}) }}}}{{% endif %}}"


def _joined(pieces: Sequence[str]) -> list[str]:
    """Joins answers with nothing between them: a template may mark an answer and its end separately."""
    joined = [*pieces[:2]]
    for between, answer in zip(pieces[2:-1:2], pieces[3::2], strict=True):
        if between:
            joined += [between, answer]
        else:
            joined[-1] += answer
    return [*joined, *pieces[2:][-1:]]


def check_messages(messages: Sequence[Message]) -> None:
    """Raises DataError unless messages are a non-empty list of mappings with "role" and "content", naming the first
    that is not one."""
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
