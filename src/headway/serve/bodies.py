"""Request bodies of OpenAI's completions and chat completions, and the generation configs that they become.

Known fields that do not affect the text (`user`, `metadata`, ...) are accepted. Unknown fields are named in `warnings`,
or refused by a strict server: nothing is ignored silently."""

import secrets
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from headway.errors import ConfigError
from headway.generate import GenerationConfig, Sampling
from headway.serve.grammar import Asked, ResponseFormat, StructuredOutputs, Tool

HARMLESS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
            "stream_options.include_obfuscation")  # fmt: skip
"""Fields that describe a request and do not affect its text."""
TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
"""Types of content parts that are text."""
MOST_TEXTS, MOST_STOPS, MOST_LIKELY, MOST_BIASED, MOST_TOOLS = 128, 16, 20, 1024, 128
Stops = Annotated[list[str], Field(max_length=MOST_STOPS)]


def is_one(texts: Any) -> bool:
    """Returns whether this is a single prompt rather than a list of prompts; a list of token ids is a single prompt."""
    return isinstance(texts, str) or any(isinstance(part, int) for part in texts)


def several(texts: Any) -> list[Any]:
    """Returns a list of prompts; a single prompt becomes a list of one."""
    return [texts] if is_one(texts) else [*texts]


class StreamOptions(BaseModel, extra="allow"):
    """Options of a stream; with `include_usage`, a last chunk reports the token counts."""

    include_usage: bool = False


class ModelRequest(BaseModel, extra="allow"):
    """The base of request bodies, which may name a model."""

    harmless: ClassVar[Collection[str]] = HARMLESS

    model: str | None = None

    @property
    def unknown(self) -> list[str]:
        """Names of unknown fields, including those of nested objects."""
        names = set(self.model_extra or ())
        for name in type(self).model_fields:
            if isinstance(part := getattr(self, name), BaseModel):
                names |= {f"{name}.{field}" for field in part.model_extra or ()}
        return sorted(names - {*self.harmless})


class TextRequest(ModelRequest):
    """The base of generation requests of every protocol: sampling settings, and whether the response is streamed.

    return_progress: whether the stream reports how much of the prompt has been read.
    timings_per_token: whether each event has the timings so far.
    """

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
        """The fields that requests of all protocols have in common."""
        return self.model_dump(include=set(TextRequest.model_fields))

    def check(self) -> None:
        """Raises ConfigError if the request asks for something that is not supported, or for fields that exclude each
        other."""
        of_streams = ("stream_options", "return_progress", "timings_per_token")
        if wrong := [name for name in of_streams if getattr(self, name, None) and not self.stream]:
            raise ConfigError(f"{', '.join(wrong)}: allowed only if stream is true")


class Body(TextRequest):
    """The base of completions and chat completions."""

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
        """Whether a last chunk reports the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def asked_grammar(self) -> Asked | None:
        """The grammar that the generated text must follow, or None. Raises ConfigError for more than one grammar."""
        fields = self.response_format, self.structured_outputs
        grammars = [grammar for field in fields if field is not None for grammar in field.asked]
        if len(grammars) > 1:
            raise ConfigError(
                f"response_format, structured_outputs: {len(grammars)} grammars were given; give one"
            )
        return grammars[0] if grammars else None

    @property
    def new_tokens(self) -> int | None:
        """Maximum number of new tokens per sequence; None allows as many as there is room for."""
        return self.max_tokens

    @property
    def likely(self) -> int | None:
        """Number of likeliest tokens that are reported beside each token; None reports no log-probabilities."""
        return None

    def config(self, **more: Any) -> GenerationConfig:
        """Returns the generation config. The default temperature is 1, as in OpenAI's API; without a seed, a random one
        is drawn."""
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
    """`POST /v1/completions`: continues prompts, given as texts or token ids."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MOST_LIKELY)
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1, le=MOST_TEXTS)

    def check(self) -> None:
        super().check()
        if self.suffix and self.echo:
            raise ConfigError("suffix and echo cannot be combined; leave one out")
        if self.best_of not in (None, self.n):
            raise ConfigError(
                f"best_of={self.best_of}: must equal n={self.n}, since all texts are returned; give n alone"
            )

    def config(self, **more: Any) -> GenerationConfig:
        return super().config(prompt_log_probs=self.echo and self.likely is not None, **more)

    @property
    def new_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def likely(self) -> int | None:
        return self.logprobs


class ChatMessage(BaseModel, extra="allow"):
    """A message of a conversation: its role and content."""

    role: str
    content: str | list[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """Returns the message as chat templates expect it: role "developer" becomes "system", and content parts become
        one text."""
        role = "system" if self.role == "developer" else self.role
        return {**(self.model_extra or {}), "role": role, "content": text_of(self.content or "")}


def text_of(content: Any) -> str:
    """Returns content as one text, its parts separated by blank lines. Raises ConfigError for a part that is not
    text."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = []
    for part in parts if isinstance(parts, list) else [parts]:
        match part:
            case {"type": kind, "text": str(text)} if kind in TEXTS:
                texts.append(text)
            case _:
                raise ConfigError(f"content: only parts of type text are supported, got {str(part)[:80]}")
    return "\n\n".join(texts)


class Chat(Body):
    """`POST /v1/chat/completions`: answers a conversation."""

    def chat(self) -> "Chat":
        """Returns self: the conversations of all protocols become chats."""
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
            raise ConfigError("top_logprobs needs logprobs; set logprobs to true, or leave top_logprobs out")
        names = [tool.function.name for tool in self.tools or ()]
        named = self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else None
        if named not in (None, *names) or (self.tool_choice == "required" and not names):
            raise ConfigError(
                f"tool_choice needs {named or 'a function'} in tools, which has {names}; add it"
            )
        if self.continues and len(self.messages) > 1 and self.messages[-2].role == "assistant":
            raise ConfigError(
                "messages: the last two are the assistant's; merge them, since the last is continued"
            )

    @property
    def continues(self) -> bool:
        """Whether the last message is continued; by default, if it is the assistant's, without tool calls, and the
        request does not set `add_generation_prompt`."""
        last = self.messages[-1]
        begun = last.role == "assistant" and not (last.model_extra or {}).get("tool_calls")
        explicit = self.continue_final_message
        return begun and self.add_generation_prompt is None if explicit is None else explicit

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template, besides the messages."""
        fields = {name: getattr(self, name) for name in ("reasoning_effort", "add_generation_prompt")}
        return self.chat_template_kwargs | {
            name: value for name, value in fields.items() if value is not None
        }

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likely(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
