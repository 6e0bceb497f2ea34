"""Request bodies of OpenAI's completions and chat completions, and the configs that they become.

Fields that are known to clients and change no text (`user`, `metadata`, ...) are taken; others that are unknown are
named in `warnings`, or refused where the server is strict. Nothing is accepted and ignored in silence."""

import secrets
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from headway.errors import ConfigError
from headway.generate import GenerationConfig, Sampling
from headway.serve.grammar import Asked, ResponseFormat, StructuredOutputs, Tool

HARMLESS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
            "stream_options.include_obfuscation")  # fmt: skip
"""Fields of clients that say something about a request, and nothing about its text."""
TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
"""Types of parts."""
MOST_TEXTS, MOST_STOPS, MOST_LIKELY, MOST_BIASED, MOST_TOOLS = 128, 16, 20, 1024, 128
Stops = Annotated[list[str], Field(max_length=MOST_STOPS)]


def is_one(texts: Any) -> bool:
    """Whether this is one text rather than a list of texts; a list with ids in it is one."""
    return isinstance(texts, str) or any(isinstance(part, int) for part in texts)


def several(texts: Any) -> list[Any]:
    """A list of texts, or of the only one."""
    return [texts] if is_one(texts) else [*texts]


class StreamOptions(BaseModel, extra="allow"):
    """`include_usage`: a last chunk tells the tokens."""

    include_usage: bool = False


class ModelRequest(BaseModel, extra="allow"):
    """The base of request bodies, which name a model."""

    harmless: ClassVar[Collection[str]] = HARMLESS

    model: str | None = None

    @property
    def unknown(self) -> list[str]:
        """Fields that are unknown here, also those of objects."""
        names = set(self.model_extra or ())
        for name in type(self).model_fields:
            if isinstance(part := getattr(self, name), BaseModel):
                names |= {f"{name}.{more}" for more in part.model_extra or ()}
        return sorted(names - {*self.harmless})


class TextRequest(ModelRequest):
    """The base of requests for texts in every protocol: how tokens are chosen, and whether the answer is streamed;
    `return_progress`: how much of the prompt has been read, too; `timings_per_token`: with each event, the times so
    far."""

    stream: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    seed: int | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    frequency_penalty: float = Field(0, ge=-2, le=2)
    presence_penalty: float = Field(0, ge=-2, le=2)
    logit_bias: dict[int, float] | None = Field(None, max_length=MOST_BIASED)

    @property
    def shared(self) -> dict[str, Any]:
        """The fields that requests of every protocol have."""
        return self.model_dump(include=set(TextRequest.model_fields))

    def check(self) -> None:
        """Raises ConfigError for what is asked for and not offered, and for fields that do not go together."""
        of_streams = ("stream_options", "return_progress", "timings_per_token")
        if wrong := [name for name in of_streams if getattr(self, name, None) and not self.stream]:
            raise ConfigError(f"{', '.join(wrong)}: of streams; set stream to true, or leave them out")


class Body(TextRequest):
    """The base of both kinds of completions."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    n: int = Field(1, ge=1, le=MOST_TEXTS)
    stream_options: StreamOptions | None = None
    stop: str | Stops | None = None
    max_tokens: int | None = Field(None, ge=0)
    return_token_ids: bool = False
    verbose: bool = False

    @property
    def tells_usage(self) -> bool:
        """Whether a last chunk tells the tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def asked_grammar(self) -> Asked | None:
        """The grammar that its texts follow; None is anything. Raises ConfigError for more than one grammar."""
        fields = self.response_format, self.structured_outputs
        grammars = [grammar for field in fields if field is not None for grammar in field.asked]
        if len(grammars) > 1:
            raise ConfigError("response_format, structured_outputs: a text follows one grammar; give one")
        return grammars[0] if grammars else None

    @property
    def new_tokens(self) -> int | None:
        """How many new tokens a text gets at most; None is what there is room for."""
        return self.max_tokens

    @property
    def likely(self) -> int | None:
        """How many of the likeliest tokens are told beside each token; None tells no probabilities."""
        return None

    def config(self, **more: Any) -> GenerationConfig:
        """The settings of its texts; sampled at temperature 1 unless given, as OpenAI does. Noise follows from the
        seed, which is drawn where none is given."""
        drawn = self.model_dump(include={*Sampling.__dataclass_fields__}, exclude_none=True)
        return GenerationConfig(
            max_new_tokens=self.new_tokens,
            sampling=Sampling(**{"temperature": 1.0, **drawn}),
            seed=secrets.randbits(31) if self.seed is None else self.seed,
            stop=self.stop or (),
            bias=self.logit_bias or {},
            log_probs=self.likely is not None,
            top_log_probs=self.likely or 0,
            prefix_cache=True,
            **more,
        )


class Completion(Body):
    """`POST /v1/completions`: prompts that are continued, as texts or ids."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MOST_LIKELY)
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1, le=MOST_TEXTS)

    def check(self) -> None:
        super().check()
        if self.suffix and self.echo:
            raise ConfigError("suffix with echo: a prompt that is filled is not told again; leave one out")
        if self.best_of not in (None, self.n):
            raise ConfigError(f"best_of={self.best_of}: all {self.n} texts are told; give n alone")

    def config(self, **more: Any) -> GenerationConfig:
        return super().config(prompt_log_probs=self.echo and self.likely is not None, **more)

    @property
    def new_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def likely(self) -> int | None:
        return self.logprobs


class ChatMessage(BaseModel, extra="allow"):
    """Who says what."""

    role: str
    content: str | list[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates read it: a developer is the system, parts are one text."""
        role = "system" if self.role == "developer" else self.role
        return {**(self.model_extra or {}), "role": role, "content": text_of(self.content or "")}


def text_of(content: Any) -> str:
    """A text, or that of its parts, a paragraph each. Raises ConfigError for what is no text."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = []
    for part in parts if isinstance(parts, list) else [parts]:
        match part:
            case {"type": kind, "text": str(text)} if kind in TEXTS:
                texts.append(text)
            case _:
                kind = part.get("type") if isinstance(part, dict) else str(part)[:40]
                raise ConfigError(f"messages: a part of type {kind!r} is no text, which is all that is read")
    return "\n\n".join(texts)


class Chat(Body):
    """`POST /v1/chat/completions`: a conversation that is answered."""

    def chat(self) -> "Chat":
        """Itself: conversations of all protocols are chats."""
        return self

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LIKELY)
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ConfigError("top_logprobs are told with logprobs; set logprobs to true, or leave them out")
        names = [tool.function.name for tool in self.tools or ()]
        named = self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else None
        if named not in (None, *names) or (self.tool_choice == "required" and not names):
            raise ConfigError(f"tool_choice: {named or 'a call'} is asked for, and tools has {names}; add it")
        if self.continues and len(self.messages) > 1 and self.messages[-2].role == "assistant":
            raise ConfigError("messages: two of the assistant at the end; make them one, which is continued")

    @property
    def continues(self) -> bool:
        """Whether the last message is gone on with: where it is the assistant's, unless something else is asked."""
        last = self.messages[-1]
        begun = last.role == "assistant" and not (last.model_extra or {}).get("tool_calls")
        explicit = self.continue_final_message
        return begun and self.add_generation_prompt is None if explicit is None else explicit

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template, beside the messages."""
        more = {name: getattr(self, name) for name in ("reasoning_effort", "add_generation_prompt")}
        return self.chat_template_kwargs | {name: value for name, value in more.items() if value is not None}

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likely(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
