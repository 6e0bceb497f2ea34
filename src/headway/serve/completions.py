"""Responses of OpenAI's completions and chat completions."""

import asyncio
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from headway import __version__
from headway.generate import Delta, ToldToken
from headway.serve.answers import Answer, Event, token_text, told_tokens
from headway.serve.bodies import Body, Completion, several
from headway.serve.errors import warned
from headway.serve.markup import Part
from headway.serve.served import Decoding
from headway.text import infill

Content = dict[str, Any]


async def continued(answer: type[Answer], model: Decoding, asked: Completion, warnings: list[str]) -> Answer:
    """Returns the response whose sequences continue prompts, not yet generated. Raises what `infill` and
    `Decoding.texts` raise."""
    tokenizer = model.lm.need_tokenizer()

    def ids(prompt: str | list[int]) -> list[int]:
        if asked.suffix:
            before = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
            return infill(tokenizer, before, asked.suffix)
        return tokenizer.encode(prompt, eos=False) if isinstance(prompt, str) else prompt

    sources = several(asked.prompt)
    prompts = await asyncio.to_thread(lambda: [*map(ids, sources)])
    texts = model.texts(prompts, asked.config(grammar=await model.grammar(asked.asked_grammar)), asked.n)
    echoes = [p if isinstance(p, str) else tokenizer.decode(p) for p in sources if asked.echo]
    return answer(asked, model, texts, warnings, echoes=[echo for echo in echoes for _ in range(asked.n)])


class CompletionAnswer(Answer):
    """The response of `POST /v1/completions`. With `return_token_ids`, as in vLLM, each choice reports its prompt's ids
    once."""

    kind, prefix, chunk = "text_completion", "cmpl", "text_completion"
    field: str = "text"
    empty: Any = ""
    """The field of a chunk that holds its content, and its value without content."""
    apart = False
    """Whether the finish reason comes in a chunk of its own."""
    asked: Body

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._begun: set[int] = set()
        self._lengths = [0] * len(self.texts)  # in characters, where the next `text_offset` begins
        self.head = {
            "id": f"{self.prefix}-{self.key}",
            "object": self.kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": f"build-{__version__}",
        }
        self.tail = warned(self.warnings) | ({"usage": None} if self.asked.tells_usage else {})

    @property
    def usage(self) -> dict[str, Any]:
        read, new = self.prompt_tokens, self.new_tokens
        return {
            "prompt_tokens": read,
            "completion_tokens": new,
            "total_tokens": read + new,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def add(self, i: int, delta: Delta) -> Sequence[Event]:
        written = self.written[i]
        content = self.said(i, delta, written.add(delta))
        reason, is_asked = written.finish_reason, self.asked.likely is not None or self.asked.return_token_ids
        tells = content or (is_asked and delta.token is not None)
        if not self.apart:
            return [self.choice(i, content, delta, reason)] if tells or reason else []
        events = [self.choice(i, content, delta)] if tells else []
        return [*events, self.choice(i, why=reason)] if reason else events

    def choice(self, i: int, data: Any = None, delta: Delta | None = None, why: str | None = None) -> Event:
        """Returns an event with one choice."""
        choice = self._choice(i, {self.field: data or self.empty}, [] if delta is None else [delta], why)
        return None, {**self.head, "object": self.chunk, "choices": [choice], **self.tail}

    def _choice(self, i: int, content: Content, deltas: Sequence[Delta], why: str | None) -> Content:
        log_probs = self.log_probs(deltas, self._lengths[i]) if deltas else None
        self._lengths[i] += sum(map(len, (log_probs or {}).get("tokens", ())))
        choice = {"index": i, **content, "logprobs": log_probs, "finish_reason": why}
        if self.asked.return_token_ids:
            choice |= {} if i in self._begun else {"prompt_token_ids": self.texts[i].request.prompt}
            choice["token_ids"] = [delta.token for delta in deltas if delta.token is not None]
        self._begun.add(i)
        return choice

    def end(self) -> Sequence[Event]:
        last = {**self.head, "object": self.chunk, "choices": [], **self.tail, **self._totals}
        return [*([(None, last)] if self.asked.tells_usage else []), (None, "[DONE]")]

    def whole(self) -> dict[str, Any]:
        self._begun, self._lengths = set(), [0] * len(self.texts)  # forgets what events have reported
        texts = enumerate(self.written)
        choices = [self._choice(i, self.full(i), text.deltas, text.finish_reason) for i, text in texts]
        return {**self.head, "choices": choices, **self.tail, **self._totals}

    @property
    def _totals(self) -> dict[str, Any]:
        totals = {"usage": self.usage, "timings": self.timings}
        if self.asked.verbose:
            prompt = self.vocabulary.decode(self.texts[0].request.prompt, special=True)
            totals["__verbose"] = {"prompt": prompt}
        return totals

    def blank(self, i: int) -> Event:
        return self.choice(i)

    def said(self, i: int, delta: Delta, parts: Sequence[Part]) -> Any:
        """Returns the content that a step adds to a sequence; empty if no part became certain."""
        written = self.written[i]
        return delta.text if written.deltas[1:] else written.text

    def full(self, i: int) -> dict[str, Any]:
        """Returns the content of a choice at the end."""
        return {"text": self.written[i].text}

    def log_probs(self, deltas: Sequence[Delta], begin: int = 0) -> dict[str, Any] | None:
        """Returns log-probabilities in the format of completions: columns over tokens. `begin` is the text offset of
        the first."""
        if self.asked.likely is None:
            return None
        rows = [*deltas[0].prompt]
        rows += [ToldToken(d.token, d.log_prob, d.top_log_probs) for d in deltas if d.token is not None]
        tokens = [token_text(self.vocabulary, row.token) for row in rows]
        return {
            "tokens": tokens,
            "token_logprobs": [row.log_prob for row in rows],
            "top_logprobs": [
                None
                if row.log_prob is None
                else {token_text(self.vocabulary, token): value for token, value in row.top_log_probs}
                for row in rows
            ],
            "text_offset": [*accumulate(map(len, tokens), initial=begin)][:-1],
        }


class ChatAnswer(CompletionAnswer):
    """The response of `POST /v1/chat/completions`."""

    kind, prefix, chunk = "chat.completion", "chatcmpl", "chat.completion.chunk"
    field, empty, apart = "delta", {}, True

    def begin(self) -> Sequence[Event]:
        return [self.choice(i, {"role": "assistant", "content": None}) for i in range(len(self.texts))]

    def said(self, i: int, delta: Delta, parts: Sequence[Part]) -> Any:
        written = self.written[i]
        if written.finish_reason == "stop" and any(part.kind == "call" for part in written.parts):
            written.finish_reason = "tool_calls"
        return self._told(i, parts)

    def full(self, i: int) -> dict[str, Any]:
        message = self._told(i, self.written[i].parts)
        for call in message.get("tool_calls", ()):
            del call["index"]
        empty = None if "tool_calls" in message else ""
        return {"message": {"role": "assistant", "content": empty, **message, "refusal": None}}

    def _told(self, i: int, parts: Sequence[Part]) -> dict[str, Any]:
        """Returns parts as a message, or as a delta of one."""
        message: dict[str, Any] = {}
        for name, kind in (("reasoning_content", "reasoning"), ("content", "text")):
            if text := "".join(part.text for part in parts if part.kind == kind):
                message[name] = text
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            if part.kind == "call":
                begun = {"name": part.text, "arguments": ""}
                key = f"call_{self.key[:16]}{i:04x}{part.call:04x}"
                calls[part.call] = {"index": part.call, "id": key, "type": "function", "function": begun}
            elif part.kind == "arguments":
                call = calls.setdefault(part.call, {"index": part.call, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
        return message | ({"tool_calls": [*calls.values()]} if calls else {})

    def log_probs(self, deltas: Sequence[Delta], begin: int = 0) -> dict[str, Any] | None:
        """Returns log-probabilities in the format of chat completions: a record per token."""
        if self.asked.likely is None:
            return None
        return {"content": told_tokens(self.vocabulary, deltas), "refusal": None}
