"""Sequence-to-sequence generation by an encoder-decoder.

An engine of an encoder-decoder generates the targets (`headway.generate.engine`); generation_config.json defines what
targets begin and end with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from headway.errors import ConfigError, DataError
from headway.generate.config import GenerationConfig
from headway.generate.loop import OpenEngine, complete
from headway.generate.requests import check_prompts, context_limit, make_requests
from headway.generate.results import Generation
from headway.models import EncoderDecoder, ModelSpec
from headway.text import MarianTokenizer, Tokenizer


def translate(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int] | Tensor],
    config: GenerationConfig | None = None,
    *,
    generation: Mapping[str, Any],
    prefixes: Sequence[Sequence[int]] | None = None,
    tokenizer: Tokenizer | MarianTokenizer | None = None,
    requests: Sequence[int] | None = None,
    batch_size: int | None = None,
    engine: OpenEngine | None = None,
) -> list[Generation]:
    """Returns one Generation per source, in their order; `prompt_tokens` counts the source's tokens.

    Greedy unless `config` says otherwise (`sampling`, or `beams`, whose `n_best` results are the `hypotheses`).

    Args:
        sources: complete encoder inputs as ids (with EOS, if the model was trained with one).
        config: settings of the targets; stop strings and prefill_chunk are not supported.
        generation: the content of generation_config.json, used for what `config` leaves open: decoder_start_token_id
            (one id, required: what targets begin with), eos_token_id, forced_bos_token_id and forced_eos_token_id
            (`forced_first` and `forced_last` of `GenerationConfig`), pad_token_id and bad_words_ids of one id each,
            which are never chosen.
        prefixes: for each source, ids that its target begins with.
        tokenizer: decodes the targets' text; without one there is no text.
        requests: numbers of the sources, which determine their random numbers; 0, 1, ... unless given.
        batch_size: at most this many sources at once (all unless given); it does not change any text.
        engine: an open engine of the model; a new one unless given.
    Raises DataError for invalid sources, ConfigError for impossible settings and for a source or target that is longer
    than the model supports; HeadwayError, naming the step, if the logits are not finite.
    """
    encoder = model.spec.encoder
    assert encoder is not None
    ids = check_prompts(sources, encoder.vocab)
    start, config = completed(config or GenerationConfig(), generation, model.spec)
    limit = context_limit(encoder, config)
    for i, source in enumerate(ids):
        if limit is not None and len(source) > limit:
            raise ConfigError(
                f"source {i} has {len(source)} tokens, more than the {limit} of this model's encoder; shorten it, or "
                "split it into sentences"
            )
    if prefixes is not None and len(prefixes) != len(ids):
        raise DataError(f"translate: {len(prefixes)} prefixes for {len(ids)} sources; give one for each")
    configs: GenerationConfig | list[GenerationConfig] = config
    if prefixes is not None:
        configs = [replace(config, prefix=tuple(prefix)) for prefix in prefixes]
    checked = make_requests([[start]] * len(ids), configs, model.spec, numbers=requests, sources=ids)
    return complete(model, checked, tokenizer, batch_size=batch_size, engine=engine)


def completed(
    config: GenerationConfig, generation: Mapping[str, Any], spec: ModelSpec
) -> tuple[int, GenerationConfig]:
    """Returns the id that targets begin with, and the config completed from generation_config.json."""
    for name, default in (("stop", ()), ("prefill_chunk", None)):
        if getattr(config, name) != default:
            raise ConfigError(
                f"translate: {name}={getattr(config, name)!r} has no effect on an encoder-decoder; leave it out"
            )
    start = _ids(generation, "decoder_start_token_id", spec)
    if len(start) != 1:
        raise ConfigError(
            "translate: decoder_start_token_id in generation_config.json must be one token id, "
            f"got {generation.get('decoder_start_token_id')!r}"
        )
    eos = tuple(config.eos) or _ids(generation, "eos_token_id", spec)
    pad = set(_ids(generation, "pad_token_id", spec)) - set(eos)
    bad: list[int] = []
    for word in generation.get("bad_words_ids") or ():
        if not isinstance(word, list) or len(word) != 1:
            raise ConfigError(
                f"translate: bad_words_ids in generation_config.json has {word}, but only single ids, as [id], can be "
                "forbidden; remove it"
            )
        bad += word
    return start[0], replace(
        config,
        eos=eos,
        forbidden=tuple(dict.fromkeys((*config.forbidden, *bad, *sorted(pad)))),
        forced_first=_or_else(config.forced_first, generation, "forced_bos_token_id", spec),
        forced_last=_or_else(config.forced_last, generation, "forced_eos_token_id", spec),
    )


def _or_else(value: int | None, generation: Mapping[str, Any], key: str, spec: ModelSpec) -> int | None:
    """Returns the value, or if it is None the id that generation_config.json has for a key."""
    ids = _ids(generation, key, spec) if value is None else (value,)
    if len(ids) > 1:
        raise ConfigError(f"translate: {key} must be one token id, got {list(ids)}")
    return ids[0] if ids else None


def _ids(generation: Mapping[str, Any], key: str, spec: ModelSpec) -> tuple[int, ...]:
    """Returns the id or ids of a key of generation_config.json; () if it is absent."""
    value = generation.get(key)
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < spec.vocab:
            raise ConfigError(f"translate: {key} must be a token id in 0..{spec.vocab - 1}, got {i!r}")
    return ids
