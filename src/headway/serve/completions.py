"""OpenAI's completions and chat completions, as they are answered."""

import asyncio
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from uuid import uuid4

from headway import __version__
from headway.generate import Delta, ToldToken
from headway.serve.answers import Answer, Event, Writing, text_of, told_tokens
from headway.serve.bodies import Body, Completion
from headway.serve.errors import warned
from headway.serve.markup import Part
from headway.serve.served import Decoding
from headway.text import infill


async def continued(model: Decoding, asked: Completion, warnings: list[str]) -> Writing:
    """The texts that continue prompts. Raises DataError as `infill`, and as `Decoding.texts`."""
    tokenizer = model.lm.need_tokenizer()

    def ids(prompt: str | list[int]) -> list[int]:
        if asked.suffix:
            before = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
            return infill(tokenizer, before, asked.suffix)
        return tokenizer.encode(prompt, eos=False) if isinstance(prompt, str) else prompt

    prompts = await asyncio.to_thread(lambda: [*map(ids, asked.prompts)])
    texts = model.texts(prompts, asked.config(grammar=await model.grammar(asked.asked_grammar)), asked.n)
    echoes = [p if isinstance(p, str) else tokenizer.decode(p) for p in asked.prompts if asked.echo]
    return Writing(model, texts, warnings, echoes=[echo for echo in echoes for _ in range(asked.n)])


class CompletionAnswer(Answer):
    """Of `POST /v1/completions`. Where ids are asked for, as of vLLM, those of the prompt are told once."""

    kind, prefix, chunk = "text_completion", "cmpl", "text_completion"
    asked: Body

    def __init__(self, writing: Writing, asked: Body) -> None:
        super().__init__(writing, asked)
        self.echoes = writing.echoes or [""] * len(self.texts)
        self._begun: set[int] = set()
        self._lengths = [0] * len(self.texts)  # of the tokens whose probabilities were told
        self.head = {
            "id": f"{self.prefix}-{uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": self.model.name,
            "system_fingerprint": f"build-{__version__}",
        }
        self.tail = warned(self.warnings) | ({"usage": None} if asked.tells_usage else {})

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
        written.add(delta)
        said, reason = self.said(i, delta), written.finish_reason
        return [self.choice(i, said, delta, reason)] if said or reason or self.asked.tells_tokens else []

    def choice(
        self, i: int, said: Any = None, delta: Delta | None = None, reason: str | None = None
    ) -> Event:
        """The event that tells it."""
        choice = self._choice(i, self.part(said), [] if delta is None else [delta], reason)
        return None, {**self.head, "object": self.chunk, "choices": [choice], **self.tail}

    def _choice(
        self, i: int, said: dict[str, Any], deltas: Sequence[Delta], reason: str | None
    ) -> dict[str, Any]:
        told = self.log_probs(deltas, self._lengths[i]) if deltas else None
        self._lengths[i] += sum(map(len, (told or {}).get("tokens", ())))
        choice = {"index": i, **said, "logprobs": told, "finish_reason": reason}
        if self.asked.return_token_ids:
            choice |= {} if i in self._begun else {"prompt_token_ids": self.texts[i].request.prompt}
            choice["token_ids"] = [delta.token for delta in deltas if delta.token is not None]
        self._begun.add(i)
        return choice

    def end(self) -> Sequence[Event]:
        told = {**self.head, "object": self.chunk, "choices": [], **self.tail, **self._totals}
        return [*([(None, told)] if self.asked.tells_usage else []), (None, "[DONE]")]

    def whole(self) -> dict[str, Any]:
        self._begun, self._lengths = set(), [0] * len(self.texts)  # events are not told
        choices = [
            self._choice(i, self.full(i), written.deltas, written.finish_reason)
            for i, written in enumerate(self.written)
        ]
        return {**self.head, "choices": choices, **self.tail, **self._totals}

    @property
    def _totals(self) -> dict[str, Any]:
        told = {"usage": self.usage, "timings": self.timings}
        if self.asked.verbose:
            prompt = self.vocabulary.decode(self.texts[0].request.prompt, special=True)
            told["__verbose"] = {"prompt": prompt}
        return told

    def blank(self, i: int) -> Event:
        return self.choice(i)

    def said(self, i: int, delta: Delta) -> Any:
        """What a step says of a text; nothing where nothing became certain."""
        return ("" if self.written[i].deltas[1:] else self.echoes[i]) + delta.text

    def part(self, said: Any) -> dict[str, Any]:
        """How a chunk tells it."""
        return {"text": said or ""}

    def full(self, i: int) -> dict[str, Any]:
        """What a choice says at the end."""
        return {"text": self.echoes[i] + self.written[i].text}

    def log_probs(self, deltas: Sequence[Delta], begin: int = 0) -> dict[str, Any] | None:
        """Probabilities as completions tell them: columns; the tokens' texts begin at `begin`."""
        if self.asked.likely is None:
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
    """Of `POST /v1/chat/completions`."""

    kind, prefix, chunk = "chat.completion", "chatcmpl", "chat.completion.chunk"

    def __init__(self, writing: Writing, asked: Body) -> None:
        super().__init__(writing, asked)
        self._readers = [writing.reader() for _ in self.texts]
        self._parts: list[list[Part]] = [[] for _ in self.texts]
        self._key = uuid4().hex[:16]

    def begin(self) -> Sequence[Event]:
        return [self.choice(i, {"role": "assistant", "content": None}) for i in range(len(self.texts))]

    def add(self, i: int, delta: Delta) -> Sequence[Event]:
        """The reason why a text ends is told after all of it."""
        written = self.written[i]
        written.add(delta)
        said, reason = self.said(i, delta), written.finish_reason
        tells = said or (self.asked.tells_tokens and delta.token is not None)
        events = [self.choice(i, said, delta)] if tells else []
        return [*events, self.choice(i, reason=reason)] if reason else events

    def said(self, i: int, delta: Delta) -> Any:
        parts = self._readers[i].push(delta.text, last=delta.finish_reason is not None)
        self._parts[i] += parts
        if self.written[i].finish_reason == "stop" and any(part.kind == "call" for part in self._parts[i]):
            self.written[i].finish_reason = "tool_calls"
        return self._told(i, parts)

    def part(self, said: Any) -> dict[str, Any]:
        return {"delta": said or {}}

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
        if self.asked.likely is None:
            return None
        return {"content": told_tokens(self.vocabulary, deltas), "refusal": None}
