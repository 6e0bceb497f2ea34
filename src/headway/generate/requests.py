"""Requests: prompts with their settings, validated and numbered."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headway.errors import ConfigError, DataError
from headway.generate.config import GenerationConfig
from headway.models import ModelSpec

USUAL_NEW_TOKENS = 128


@dataclass(frozen=True, eq=False)
class Request:
    """One text to generate.

    number: key of its random numbers, and its name in errors.
    prompt: ids that the decoder reads first; the new tokens follow them.
    config: its settings.
    max_new_tokens: maximum number of new tokens.
    source: ids that the encoder reads; None for a decoder.
    """

    number: int
    prompt: list[int]
    config: GenerationConfig
    max_new_tokens: int
    source: list[int] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Number of input tokens: those of the source if there is one, else those of the prompt."""
        return len(self.prompt if self.source is None else self.source)


def check_prompts(prompts: Sequence[Sequence[int] | Tensor], vocab: int) -> list[list[int]]:
    """Returns the prompts as lists of ids. Raises DataError for the first that is empty or has an id outside the
    vocabulary."""
    if isinstance(prompts, (str, bytes)) or prompts is None:
        raise DataError(f"prompts must be lists of token ids, got {type(prompts).__name__}")
    if len(prompts) == 0:
        raise DataError("no prompts: the batch is empty")
    checked: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, Tensor) and prompt.dim() == 1:
            prompt = prompt.tolist()
        if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Sequence):
            raise DataError(f"prompt {i} must be a list of token ids, got {type(prompt).__name__}")
        if not prompt:
            raise DataError(f"prompt {i} is empty: a model continues at least one token; begin with BOS")
        for place, token in enumerate(prompt):
            if isinstance(token, bool) or not isinstance(token, int):
                raise DataError(f"prompt {i}: token {place} must be an integer id, got {token!r}")
            if not 0 <= token < vocab:
                raise DataError(
                    f"prompt {i}: token id {token} at place {place} is outside the model's vocabulary of {vocab} "
                    f"(0..{vocab - 1}); was it made by another tokenizer?"
                )
        checked.append(list(prompt))
    return checked


def make_requests(
    prompts: Sequence[list[int]],
    config: GenerationConfig | Sequence[GenerationConfig] | None,
    spec: ModelSpec,
    *,
    numbers: Sequence[int] | None = None,
    sources: Sequence[list[int]] | None = None,
) -> list[Request]:
    """Returns a request for each checked prompt (`check_prompts`), or for each source; prompts are then what targets
    begin with.

    `config` is one for all, or one for each. Raises ConfigError for numbers or configs of another count, repeated
    numbers, ids outside the vocabulary, a context that is too short, and configs that differ in `session_options`."""
    count = len(prompts)
    numbers = list(range(count)) if numbers is None else list(numbers)
    if len(numbers) != count:
        kind = "prompts" if sources is None else "sources"
        raise ConfigError(f"requests: {len(numbers)} numbers for {count} {kind}")
    if len(set(numbers)) != count:
        raise ConfigError(f"requests must differ from each other, one per prompt, got {numbers}")
    configs = [config or GenerationConfig()] * count if not isinstance(config, Sequence) else list(config)
    if len(configs) != count:
        raise ConfigError(
            f"config: {len(configs)} configs for {count} prompts; give one for all, or one for each"
        )
    if any(request_config.session_options != configs[0].session_options for request_config in configs):
        raise ConfigError(
            "config: use_cache, kv_cache_dtype, prefill_chunk and exact must be the same for all prompts of a call"
        )
    for request_config in {id(request_config): request_config for request_config in configs}.values():
        for name in ("bias", "forbidden", "prefix", "forced_first", "forced_last"):
            value = getattr(request_config, name)
            for token in [value] if name.startswith("forced") else value:
                if token is not None and not 0 <= token < spec.vocab:
                    raise ConfigError(
                        f"{name}: token id {token} is outside the model's vocabulary of {spec.vocab}"
                    )
    limits = [_max_new_tokens(i, *pair, spec) for i, pair in enumerate(zip(prompts, configs, strict=True))]
    encoder_inputs: Sequence[list[int] | None] = [None] * count if sources is None else sources
    return [
        Request(*fields) for fields in zip(numbers, prompts, configs, limits, encoder_inputs, strict=True)
    ]


def by_config(requests: Sequence[Request]) -> list[list[int]]:
    """Returns the indices of the requests, grouped by config (the same object)."""
    groups: dict[int, list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault(id(request.config), []).append(i)
    return list(groups.values())


def context_limit(spec: ModelSpec, config: GenerationConfig) -> int | None:
    """Returns the length of the longest sequence that may be read, in tokens; None is no limit."""
    return spec.context_limit if config.beyond_context else spec.usual_context


def _max_new_tokens(i: int, prompt: list[int], config: GenerationConfig, spec: ModelSpec) -> int:
    """Returns the maximum number of new tokens of prompt i. Raises ConfigError if the context is too short for the
    requested number."""
    limit, requested = context_limit(spec, config), config.max_new_tokens
    remaining = None if limit is None else limit - len(prompt)
    needed = requested or 0
    if remaining is not None and (remaining < needed or remaining < 0):
        hard = limit == spec.context_limit
        limit_kind = "can take" if hard else "was trained on"
        beyond = "" if hard else ", or set beyond_context=True (--beyond-context)"
        remedy = f"ask for at most {remaining} new tokens" if remaining > 0 else "shorten the prompt"
        raise ConfigError(
            f"prompt {i} has {len(prompt)} tokens, {needed} more were asked for: {len(prompt) + needed} in all, but "
            f"this model {limit_kind} {limit}; {remedy}{beyond}"
        )
    if requested is not None:
        return requested
    return USUAL_NEW_TOKENS if remaining is None else min(USUAL_NEW_TOKENS, remaining)
