"""OpenAI's completions and chat completions, as they are answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any
from uuid import uuid4

from headway import __version__
from headway.generate import Delta, ToldToken
from headway.generate.sequences import SampledText
from headway.serve.answers import Answer, Event, text_of, told_token
from headway.serve.errors import warned
from headway.serve.markup import CallReader, Part
from headway.serve.served import Decoding


class CompletionAnswer(Answer):
    """Of `POST /v1/completions`.

    likely: how many of the likeliest tokens are told beside each token; None tells no probabilities.
    echoes: what stands before each text.   usage: whether a last chunk tells the tokens.
    ids: whether ids are told, as vLLM does: those of the prompt, once, and those of the text.
    """

    kind, prefix, chunk = "text_completion", "cmpl", "text_completion"

    def __init__(
        self,
        model: Decoding,
        texts: Sequence[SampledText],
        warnings: Sequence[str] = (),
        *,
        likely: int | None = None,
        echoes: Sequence[str] = (),
        usage: bool = False,
        ids: bool = False,
    ) -> None:
        super().__init__(model, texts, warnings)
        self.likely, self.echoes, self._tell_usage, self._tell_ids = likely, echoes, usage, ids
        self._begun: set[int] = set()
        self._lengths = [0] * len(texts)  # of the tokens whose probabilities were told
        self.head = {
            "id": f"{self.prefix}-{uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": f"build-{__version__}",
        }
        self.tail = warned(warnings) | ({"usage": None} if usage else {})

    @property
    def usage(self) -> dict[str, Any]:
        given, new = self.prompt_tokens, self.new_tokens
        return {
            "prompt_tokens": given,
            "completion_tokens": new,
            "total_tokens": given + new,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def add(self, i: int, delta: Delta) -> Sequence[Event]:
        written = self.written[i]
        first = not written.deltas
        written.add(delta)
        said = self.said(i, delta, first)
        if not said and written.finish_reason is None and self.likely is None and not self._tell_ids:
            return ()
        return [self.choice(i, said, delta, written.finish_reason)]

    def choice(self, i: int, said: Any, delta: Delta | None = None, reason: str | None = None) -> Event:
        """The event that tells it."""
        told = None if delta is None else self.log_probs([delta], self._lengths[i])
        self._lengths[i] += sum(map(len, (told or {}).get("tokens", ())))
        choice = {"index": i, **self.part(said), "logprobs": told, "finish_reason": reason}
        choice |= self._ids(i, [] if delta is None else [delta], i not in self._begun)
        self._begun.add(i)
        return None, {**self.head, "object": self.chunk, "choices": [choice], **self.tail}

    def end(self) -> Sequence[Event]:
        told = {**self.head, "object": self.chunk, "choices": [], **self.tail, **self._totals}
        return [*([(None, told)] if self._tell_usage else []), (None, "[DONE]")]

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                **self.full(i),
                "logprobs": self.log_probs(written.deltas),
                "finish_reason": written.finish_reason,
                **self._ids(i, written.deltas, True),
            }
            for i, written in enumerate(self.written)
        ]
        return {**self.head, "choices": choices, **self.tail, **self._totals}

    @property
    def _totals(self) -> dict[str, Any]:
        return {"usage": self.usage, "timings": self.timings}

    def said(self, i: int, delta: Delta, first: bool) -> Any:
        """What a step says of a text; nothing where nothing became certain."""
        return (self._echo(i) if first else "") + delta.text

    def part(self, said: Any) -> dict[str, Any]:
        """How a chunk tells it."""
        return {"text": said}

    def full(self, i: int) -> dict[str, Any]:
        """What a choice says at the end."""
        return {"text": self._echo(i) + self.written[i].text}

    def _ids(self, i: int, deltas: Sequence[Delta], prompt: bool) -> dict[str, Any]:
        """The ids that deltas added, perhaps with those of the prompt, where they are told."""
        if not self._tell_ids:
            return {}
        given = {"prompt_token_ids": self.texts[i].request.prompt} if prompt else {}
        return {**given, "token_ids": [delta.token for delta in deltas if delta.token is not None]}

    def _echo(self, i: int) -> str:
        return self.echoes[i] if self.echoes else ""

    def log_probs(self, deltas: Sequence[Delta], begin: int = 0) -> dict[str, Any] | None:
        """Probabilities as completions tell them: columns; the tokens' texts begin at `begin`."""
        if self.likely is None:
            return None
        told = [*deltas[0].prompt]
        told += [ToldToken(d.token, d.log_prob, d.top_log_probs) for d in deltas if d.token is not None]
        tokens = [text_of(self.vocabulary, one.token) for one in told]
        return {
            "tokens": tokens,
            "token_logprobs": [one.log_prob for one in told],
            "top_logprobs": [
                None
                if one.log_prob is None
                else {text_of(self.vocabulary, token): value for token, value in one.top_log_probs}
                for one in told
            ],
            "text_offset": [*accumulate(map(len, tokens), initial=begin)][:-1],
        }


class ChatAnswer(CompletionAnswer):
    """Of `POST /v1/chat/completions`. `reader` makes what divides a text into parts."""

    kind, prefix, chunk = "chat.completion", "chatcmpl", "chat.completion.chunk"

    def __init__(
        self,
        model: Decoding,
        texts: Sequence[SampledText],
        warnings: Sequence[str] = (),
        *,
        reader: Callable[[], CallReader] = CallReader,
        **how: Any,
    ) -> None:
        super().__init__(model, texts, warnings, **how)
        self._readers = [reader() for _ in texts]
        self._parts: list[list[Part]] = [[] for _ in texts]
        self._key = uuid4().hex[:16]

    def begin(self) -> Sequence[Event]:
        return [self.choice(i, {"role": "assistant", "content": None}) for i in range(len(self.texts))]

    def add(self, i: int, delta: Delta) -> Sequence[Event]:
        """The reason why a text ends is told after all of it."""
        written = self.written[i]
        written.add(delta)
        said, reason = self.said(i, delta, False), written.finish_reason
        events = (
            [self.choice(i, said, delta)]
            if said or ((self.likely is not None or self._tell_ids) and delta.token is not None)
            else []
        )
        return [*events, self.choice(i, {}, None, reason)] if reason else events

    def said(self, i: int, delta: Delta, first: bool) -> Any:
        parts = self._readers[i].push(delta.text, last=delta.finish_reason is not None)
        self._parts[i] += parts
        if self.written[i].finish_reason == "stop" and any(part.kind == "call" for part in self._parts[i]):
            self.written[i].finish_reason = "tool_calls"
        return self._told(i, parts)

    def part(self, said: Any) -> dict[str, Any]:
        return {"delta": said}

    def full(self, i: int) -> dict[str, Any]:
        told = self._told(i, self._parts[i])
        for call in told.get("tool_calls", ()):
            del call["index"]
        empty = None if "tool_calls" in told else ""
        return {"message": {"role": "assistant", "content": empty, **told, "refusal": None}}

    def _told(self, i: int, parts: Sequence[Part]) -> dict[str, Any]:
        """Parts as a message, or a piece of it."""
        said = {"reasoning_content": "reasoning", "content": "text"}
        told: dict[str, Any] = {
            name: text
            for name, kind in said.items()
            if (text := "".join(part.text for part in parts if part.kind == kind))
        }
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            if part.kind == "call":
                begun = {"name": part.text, "arguments": ""}
                key = f"call_{self._key}{i:04x}{part.call:04x}"
                calls[part.call] = {"index": part.call, "id": key, "type": "function", "function": begun}
            elif part.kind == "arguments":
                call = calls.setdefault(part.call, {"index": part.call, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
        return told | ({"tool_calls": [*calls.values()]} if calls else {})

    def log_probs(self, deltas: Sequence[Delta], begin: int = 0) -> dict[str, Any] | None:
        """Probabilities as conversations tell them: a record for each token."""
        if self.likely is None:
            return None
        told = [delta for delta in deltas if delta.token is not None]
        return {
            "content": [
                {
                    **self._record(delta.token or 0, delta.log_prob or 0.0),
                    "top_logprobs": [self._record(*pair) for pair in delta.top_log_probs],
                }
                for delta in told
            ],
            "refusal": None,
        }

    def _record(self, token: int, log_prob: float) -> dict[str, Any]:
        return told_token(self.vocabulary, token, log_prob)
