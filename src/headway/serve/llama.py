"""Request bodies and responses of llama.cpp's completions."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from headway.errors import ConfigError
from headway.generate import Delta, GenerationConfig
from headway.serve.answers import Answer, Event, told_tokens
from headway.serve.bodies import MOST_BIASED, MOST_LIKELY, Completion, Stops, TextRequest, is_one, several
from headway.serve.errors import warned
from headway.serve.served import Decoding
from headway.text import Tokenizer, infill

Mixed = list[int | str]
"""Token ids, with texts between them."""
Bias = float | bool
"""The number that is added to a logit; False forbids the token."""


def _plain(prompt: Any) -> Any:
    """Returns prompts with {"prompt_string": text} replaced by the text; other objects are left for validation to
    refuse."""
    if isinstance(prompt, dict) and prompt.keys() == {"prompt_string"}:
        return prompt["prompt_string"]
    return [_plain(part) for part in prompt] if isinstance(prompt, list) else prompt


class LlamaCompletion(TextRequest):
    """`POST /completion`: continues prompts, given as texts, token ids or a mix of both."""

    prompt: Annotated[str | list[int | str | Mixed], BeforeValidator(_plain)]
    n_predict: int = Field(-1, ge=-1)
    temperature: float | None = Field(0.8, ge=0)
    top_k: int | None = Field(40, ge=0)
    top_p: float | None = Field(0.95, gt=0, le=1)
    min_p: float | None = Field(0.05, ge=0, le=1)
    repeat_penalty: float | None = Field(None, gt=0)
    logit_bias: list[tuple[int | str, Bias]] | dict[str, Bias] = Field([], max_length=MOST_BIASED)  # type: ignore[assignment]
    stop: Stops = Field([])
    n_probs: int = Field(0, ge=0, le=MOST_LIKELY)
    post_sampling_probs: bool = False
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    ignore_eos: bool = False
    cache_prompt: bool = True
    return_tokens: bool = False
    response_fields: list[str] = Field([])

    def check(self) -> None:
        super().check()
        if None not in (self.repetition_penalty, self.repeat_penalty):
            raise ConfigError("repetition_penalty, repeat_penalty: two names of one setting; give one")

    def ids(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Returns the token ids of each prompt."""

        def of_parts(parts: Mixed) -> Iterator[int]:
            for position, part in enumerate(parts):
                yield from (
                    [part] if isinstance(part, int) else tokenizer.encode(part, bos=not position, eos=False)
                )

        return [
            [*of_parts([prompt] if isinstance(prompt, str) else prompt)] for prompt in several(self.prompt)
        ]

    async def config(self, model: Decoding) -> GenerationConfig:
        """Returns the generation config."""
        grammars = {"json": self.json_schema, "grammar": self.grammar or None}
        chosen = {name: source for name, source in grammars.items() if source is not None}
        changed = {
            "prompt": "",
            "structured_outputs": chosen or None,
            "logprobs": self.n_probs or None,
            "seed": None if self.seed == -1 else self.seed,
            "stop": self.stop,
            "repetition_penalty": self.repetition_penalty or self.repeat_penalty,
            "logit_bias": self._bias(model.lm.need_tokenizer(), model.lm.eos if self.ignore_eos else ()),
        }
        body = Completion.model_validate({**self.shared, **changed})
        config = body.config(grammar=await model.grammar(body.asked_grammar))
        most = None if self.n_predict < 0 else self.n_predict
        drawn = self.post_sampling_probs and self.n_probs > 0
        return replace(config, max_new_tokens=most, prefix_cache=self.cache_prompt, drawn_log_probs=drawn)

    def _bias(self, tokenizer: Tokenizer, never: Sequence[int]) -> dict[int, float]:
        """Returns the bias of each id; the bias of a text holds for each of its tokens. The ids `never` are
        forbidden."""
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, dict) else self.logit_bias
        bias: dict[int, float] = {}
        for name, value in pairs:
            digits = isinstance(name, int) or name.isdecimal()
            ids = [int(name)] if digits else tokenizer.encode(str(name), bos=False)
            bias |= dict.fromkeys(ids, float("-inf") if value is False else float(value))
        return bias | dict.fromkeys(never, float("-inf"))


class ExtraFile(BaseModel):
    """Another file, as context."""

    filename: str = ""
    text: str


class Infill(LlamaCompletion):
    """`POST /infill`: generates the text between a prefix and a suffix."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] = Field([])
    prompt: str = ""

    def ids(self, tokenizer: Tokenizer) -> list[list[int]]:
        files = [(extra.filename, extra.text) for extra in self.input_extra]
        return [infill(tokenizer, self.input_prefix + self.prompt, self.input_suffix, files)]


async def filled(
    answer: type[Answer], model: Decoding, asked: LlamaCompletion, warnings: list[str]
) -> Answer:
    """Returns the response whose sequences continue prompts or fill a gap, not yet generated. Raises what `infill` and
    `Decoding.texts` raise."""
    ids = await asyncio.to_thread(asked.ids, model.lm.need_tokenizer())
    return answer(asked, model, model.texts(ids, await asked.config(model)), warnings)


class LlamaAnswer(Answer):
    """The response of `POST /completion` and `/infill`."""

    asked: LlamaCompletion

    def blank(self, i: int) -> Event:
        return None, {"index": i, "content": "", "tokens": [], "stop": False}

    def add(self, i: int, delta: Delta) -> Sequence[Event]:
        self.written[i].add(delta)
        events: list[Event] = []
        if delta.token is not None:
            chunk = {"index": i, "content": delta.text, "tokens": [delta.token], "stop": False}
            events.append((None, chunk | self._probabilities([delta])))
        if delta.finish_reason is not None:
            events.append((None, {**self._result(i), "content": "", "tokens": []}))
        return events

    def whole(self) -> Any:
        results = [self._picked(self._result(i)) for i in range(len(self.texts))]
        return results[0] if is_one(self.asked.prompt) else results

    def _result(self, i: int) -> dict[str, Any]:
        written, text = self.written[i], self.texts[i]
        ended = "limit" if written.finish_reason == "length" else "eos"
        request = text.request
        settings = self.asked.model_dump(exclude={"prompt", "response_fields"})
        bias = [{"token": token, "bias": value} for token, value in request.config.bias.items()]
        settings |= {"n_predict": request.max_new_tokens, "seed": request.config.seed}
        settings |= {"logit_bias": bias, "n_ctx": self.model.context}
        return {
            "index": i,
            "content": written.text,
            "tokens": text.ids if self.asked.return_tokens else [],
            "stop": True,
            "model": self.model.name,
            "tokens_predicted": written.tokens,
            "tokens_evaluated": request.prompt_tokens,
            "tokens_cached": text.stored,
            "generation_settings": settings,
            "prompt": self.vocabulary.decode(request.prompt, special=True),
            "has_new_line": "\n" in written.text,
            "truncated": ended == "limit" and self.asked.n_predict < 0,
            "stop_type": "word" if text.stopped_by else ended,
            "stopping_word": text.stopped_by or "",
            "timings": self.timings,
            **self._probabilities(written.deltas),
            **warned(self.warnings),
        }

    def _picked(self, result: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields that `response_fields` names, or all; "a/b" is field b of object a."""
        if not self.asked.response_fields:
            return result
        flat = result | {f"{name}/{field}": value for name, part in result.items() if isinstance(part, dict)
                         for field, value in part.items()}  # fmt: skip
        return {name: flat[name] for name in self.asked.response_fields if name in flat}

    def _probabilities(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        if not self.asked.n_probs:
            return {}
        drawn = self.asked.post_sampling_probs
        return {"completion_probabilities": told_tokens(self.vocabulary, deltas, drawn=drawn)}
