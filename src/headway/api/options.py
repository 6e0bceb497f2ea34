"""What calls of a language model can be asked for, beside the texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, TypedDict

from headway.api.drafting import AnyDraft
from headway.api.pretrained import BATCH, check_options
from headway.errors import ConfigError
from headway.generate import Beams, GenerationConfig, Sampling


class Writing(TypedDict, total=False):
    """How to write a text. Whatever is not given is greedy, seed 0, up to 128 new tokens, until EOS.

    max_new_tokens: at most so many (None: 128, or what the context has room for).
    temperature, top_k, top_p, min_p, repetition_penalty: see `Sampling`; temperature 0 is greedy.
    beams: search for the text of the highest score instead, with so many beams, or as `Beams` says.
    length_penalty, n_best, early_stopping, with_greedy: of the search, see `Beams`.
    seed: equal seeds give equal text.   stop: strings that end the text, or one.
    eos: ids that end the text, instead of the model's.   beyond_context: go on past the trained context.
    log_probs: the `log_probs` of the result are ln p of each new token, and with `top_log_probs` its `top_log_probs`
        those of so many of the likeliest in each place: see `Generation`.
    adapters: names of those that are added (as `load` was given them), all that are active unless given.
    min_new_tokens, no_repeat_ngram, prefix_cache, use_cache, kv_cache_dtype, prefill_chunk, exact: see
        `GenerationConfig`.
    """

    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    beams: Beams | int | None
    length_penalty: float
    n_best: int
    early_stopping: bool | Literal["never"]
    with_greedy: bool
    min_new_tokens: int
    no_repeat_ngram: int
    seed: int
    stop: Sequence[str] | str
    log_probs: bool
    top_log_probs: int
    eos: Sequence[int]
    adapters: Sequence[str] | None
    beyond_context: bool
    prefix_cache: bool
    use_cache: bool
    kv_cache_dtype: str
    prefill_chunk: int | None
    exact: bool


class Options(Writing, total=False):
    """How to generate. As `Writing`, and

    draft, draft_tokens: fewer steps for the same text where the next tokens can be guessed: from the text itself
        ("ngram"), by a smaller `LanguageModel` of the same tokenizer, or by a `Draft`; at most so many at a time.
    """

    draft: AnyDraft | None
    draft_tokens: int | None


class Search(Writing, total=False):
    """How to translate. As `Writing`, but with 4 beams, and

    prefix: text that every translation begins with, or one for each text; the search goes on from it.
    batch_size: texts at once, 32 unless given; it changes no text.
    """

    prefix: str | Sequence[str]
    batch_size: int


class Scoring(TypedDict, total=False):
    """How to score texts.

    batch_size: rows read at once; changes no result but by rounding.   beyond_context: go on past the trained context.
    special: control tokens written in the texts are control tokens, not text.
    """

    batch_size: int
    beyond_context: bool
    special: bool


_SAMPLING = tuple(field.name for field in fields(Sampling))
_BEAMS = tuple(field.name for field in fields(Beams) if field.name != "width")


def config_of(options: Mapping[str, Any], unused: Sequence[int]) -> GenerationConfig:
    """The config of `Writing`, for a model that never has an `unused` id.

    Raises ConfigError for what a search is asked where no number of beams is given, and as `GenerationConfig`."""
    given = dict(options)
    sampling = Sampling(**{name: given.pop(name) for name in _SAMPLING if name in given})
    search = {name: given.pop(name) for name in _BEAMS if name in given}
    if isinstance(given.get("beams"), int):
        given["beams"] = Beams(given["beams"], **search)
    elif search:
        raise ConfigError(
            f"{next(iter(search))} is about a beam search, and no number of beams was given; add beams=4 (--beams 4), "
            "or leave it out"
        )
    return GenerationConfig(**given, sampling=sampling, forbidden=unused)


def scoring_of(call: str, how: Scoring) -> tuple[dict[str, Any], bool]:
    """The options of `headway.generate.score`, and `special`."""
    check_options(call, how, Scoring.__annotations__)
    options: dict[str, Any] = {"batch_size": BATCH, **how}
    return options, options.pop("special", False)
