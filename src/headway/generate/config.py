"""What is asked of a generation, checked before anything runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from headway.cache import kv_dtype
from headway.errors import ConfigError, DataError
from headway.generate.beams import Beams
from headway.generate.sampling import Sampling
from headway.generate.stop import StopScanner
from headway.models import ModelSpec

USUAL_NEW_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Everything about a generation but model and prompts.

    max_new_tokens: at most so many; None is 128, or what the context has room for if that is less.
    sampling, seed: how tokens are chosen; equal settings, seed and request number give equal text.
    beams: look for the texts of the highest score instead of sampling; see `Beams`.
    eos: ids that end a text (and are not part of it).
    stop: strings that end a text (and are not part of it), also when they are split across tokens.
    forbidden: ids that are never chosen.
    use_cache: False computes every step from the whole text: slow, the same text. For checking.
    kv_cache_dtype: what the cache stores: "auto" (keys and values as the model makes them) or "int8" (rounded: a
        quarter of float32, half of bfloat16, and nearly the same text).
    prefill_chunk: prompts are read in chunks of so many tokens (less memory); None reads them at once.
    beyond_context: allow more tokens than the model was trained on.
    """

    max_new_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    beams: Beams | None = None
    eos: Sequence[int] = ()
    stop: Sequence[str] = ()
    forbidden: Sequence[int] = ()
    use_cache: bool = True
    kv_cache_dtype: str = "auto"
    prefill_chunk: int | None = None
    beyond_context: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 0), ("prefill_chunk", 1)):
            value = getattr(self, name)
            if value is not None and not (_whole(value) and value >= least):
                more = "" if _whole(value) else "; it counts tokens, in whole numbers"
                raise ConfigError(f"{name} must be {least} or more, got {value!r}{more}")
        if self.prefill_chunk is not None and not self.use_cache:
            raise ConfigError(
                "prefill_chunk needs the cache: without it every step reads the whole text at once"
            )
        if kv_dtype(self.kv_cache_dtype) is not None and not self.use_cache:
            raise ConfigError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} says what the cache stores, but use_cache is False"
            )
        if not isinstance(self.eos, Collection) or not all(map(_whole, self.eos)):
            raise ConfigError(f"eos is a list of token ids, got {self.eos!r}; write a single id as [id]")
        if isinstance(self.stop, str):
            raise ConfigError(
                f"stop is a list of strings, got the string {self.stop!r}; write [{self.stop!r}]"
            )
        StopScanner(self.stop)
        if self.beams is not None:
            self._check_beams(self.beams)

    def _check_beams(self, beams: Beams) -> None:
        if not isinstance(beams, Beams):
            raise ConfigError(f"beams must be a Beams, got {beams!r}; write Beams({beams!r})")
        plain = Sampling(repetition_penalty=self.sampling.repetition_penalty)
        if self.sampling != plain or self.seed:
            raise ConfigError(
                f"beams: a beam search draws nothing, but {self.sampling} and seed={self.seed} were given; leave "
                "out temperature, top_k, top_p, min_p and seed, or the beams"
            )
        if self.stop:
            raise ConfigError(
                f"beams: a beam search ends texts by eos alone, but stop strings {list(self.stop)} were given; "
                "leave out either"
            )
        if self.max_new_tokens is not None and beams.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"beams: min_new_tokens is {beams.min_new_tokens}, but max_new_tokens {self.max_new_tokens}"
            )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_prompts(prompts: Sequence[Sequence[int] | Tensor], vocab: int) -> list[list[int]]:
    """The prompts as lists of ids; DataError names the first that is empty or has an id outside the vocab."""
    if isinstance(prompts, (str, bytes)) or prompts is None:
        raise DataError(f"prompts are lists of token ids, got {type(prompts).__name__}")
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
            if not _whole(token):
                raise DataError(f"prompt {i}: token {place} must be an integer id, got {token!r}")
            if not 0 <= token < vocab:
                raise DataError(
                    f"prompt {i}: token id {token} at place {place} is outside the model's vocabulary of {vocab} "
                    f"(0..{vocab - 1}); was it made by another tokenizer?"
                )
        checked.append(list(prompt))
    return checked


def rooms(prompts: list[list[int]], settings: GenerationConfig, spec: ModelSpec) -> list[int]:
    """How many new tokens each prompt may get; ConfigError when the context has no room for what is asked."""
    hard = spec.context_limit
    limit = hard if settings.beyond_context else min(spec.trained_context, hard or spec.trained_context)
    found = []
    for i, prompt in enumerate(prompts):
        asked = settings.max_new_tokens
        room = None if limit is None else limit - len(prompt)
        need = asked or 0
        if room is not None and (room < need or room < 0):
            what = "can take" if limit == hard else "was trained on"
            more = (
                "" if limit == hard else ", or beyond_context=True (--beyond-context) to go on all the same"
            )
            fewer = f"at most {room} new tokens" if room > 0 else "a shorter prompt"
            raise ConfigError(
                f"prompt {i} has {len(prompt)} tokens, {need} more were asked for: {len(prompt) + need} in all, but "
                f"this model {what} {limit}; ask for {fewer}{more}"
            )
        usual = USUAL_NEW_TOKENS if room is None else min(USUAL_NEW_TOKENS, room)
        found.append(usual if asked is None else asked)
    return found
