"""One text for another: generation by an encoder-decoder.

Sources of different lengths are read together, once; every layer's keys of them are computed once. Then each step feeds
every live target its last token, as in `headway.generate.loop`.

Legend: B sources of a batch, R live targets, T slots of a call, V vocab.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.cache import EncoderDecoderCache, kv_dtype
from headway.errors import ConfigError
from headway.generate.beams import Beams, search
from headway.generate.config import GenerationConfig, check_prompts, rooms
from headway.generate.constraints import Text, TokenConstraints
from headway.generate.results import Generation, Hypothesis, Reason
from headway.generate.sampling import check_logits, uniform
from headway.models import EncoderDecoder, ModelSpec
from headway.tokens import Tokens


class Decodes(Protocol):
    """A tokenizer, as far as it is needed here."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a target's ids."""
        ...


def translate(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int] | Tensor],
    settings: GenerationConfig | None = None,
    *,
    generation: Mapping[str, Any],
    tokenizer: Decodes | None = None,
    requests: Sequence[int] | None = None,
    batch_size: int | None = None,
) -> list[Generation]:
    """One Generation per source, in their order; `prompt_tokens` are the source's.

    Greedy unless `settings` say otherwise (`sampling`, or `beams`, whose `n_best` are the `hypotheses`).

    Args:
        sources: ids, with all that the encoder is to see (an EOS, where it was trained with one).
        settings: of the target; stop strings and prefill_chunk do not exist here.
        generation: the content of generation_config.json. Of it decide, where `settings` say nothing:
            decoder_start_token_id (one id, needed: what targets begin with), eos_token_id, forced_bos_token_id and
            forced_eos_token_id (`forced_first` and `forced_last` of `TokenConstraints`), pad_token_id and bad_words_ids
            of one id each, which are never chosen.
        tokenizer: gives the targets' text; without one there is none.
        requests: numbers of the sources, which decide their noise; 0, 1, ... unless given.
        batch_size: at most so many sources at once (all unless given); it does not change any text.
    Raises DataError for sources that are none, ConfigError for settings that cannot be and for a source or target that
    is longer than the model takes; HeadwayError naming the step when its logits are no numbers.
    """
    assert model.spec.encoder is not None
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"batch_size must be 1 or more, got {batch_size}")
    ids = check_prompts(sources, model.spec.encoder.vocab)
    numbers = list(range(len(ids))) if requests is None else list(requests)
    if len(numbers) != len(ids):
        raise ConfigError(f"requests: {len(numbers)} numbers for {len(ids)} sources")
    start, settings, rules = _asked(generation, settings or GenerationConfig(), model.spec)
    _check_lengths(ids, settings, model.spec.encoder)
    (room,) = rooms([[start]], settings, model.spec)
    size, found = batch_size or len(ids), []
    for at in range(0, len(ids), size):
        part, names = ids[at : at + size], numbers[at : at + size]
        begun = time.perf_counter()
        if room == 0:
            texts = [[Hypothesis((), (), 0.0, "length")] for _ in part]
        elif settings.beams is not None:
            texts = _search(
                Seq2SeqSession(model, part, settings), len(part), start, room, names, settings, settings.beams
            )
        else:
            texts = _sample(
                Seq2SeqSession(model, part, settings), len(part), start, room, names, settings, rules
            )
        seconds = time.perf_counter() - begun
        for request, source, best in zip(names, part, texts, strict=True):
            read = [_read(text, rules, tokenizer) for text in best]
            found.append(
                Generation(
                    request=request,
                    prompt_tokens=len(source),
                    ids=list(read[0].ids),
                    text=read[0].text,
                    finish_reason=read[0].finish_reason,
                    seconds_to_first_token=None,
                    seconds=seconds,
                    hypotheses=tuple(read) if settings.beams is not None else (),
                )
            )
    return found


class Seq2SeqSession:
    """Targets that grow together (`Steps`), one for each source at first. The model is in evaluation mode during
    the calls only, so that a model in training can translate."""

    def __init__(
        self, model: EncoderDecoder, sources: Sequence[Sequence[int]], settings: GenerationConfig
    ) -> None:
        self.model, self.device = model, model.decoder.embedding.device
        self.dtype = kv_dtype(settings.kv_cache_dtype)
        lengths = [len(source) for source in sources]
        ids = torch.zeros(len(sources), max(lengths), dtype=torch.int64)
        for row, source in zip(ids, sources, strict=True):
            row[: len(source)] = torch.tensor(source, dtype=torch.int64)
        tokens = Tokens.from_lengths(lengths, max(lengths)).to(self.device)
        with _evaluating(model):
            self.memory = model.encode(ids.to(self.device), tokens=tokens)
            self.cache: EncoderDecoderCache | None = self._fresh() if settings.use_cache else None
        self.rows = list(range(len(sources)))
        self.texts = ids.new_zeros(len(sources), 0)

    def step(self, ids: Tensor) -> Tensor:
        """Each target goes on by its ids [R, T]; logits [R, V] of the token after them."""
        ids = ids.to(self.device)
        with _evaluating(self.model):
            if self.cache is not None:
                return self.model.decode(ids, self.cache)[:, -1]
            self.texts = torch.cat((self.texts.to(self.device), ids), 1)
            cache = self._fresh()
            cache.reorder(self.rows)
            return self.model.decode(self.texts, cache)[:, -1]

    def reorder(self, rows: Sequence[int]) -> None:
        """Target i becomes what target rows[i] was; there may be more or fewer than before."""
        with torch.inference_mode():
            if self.cache is not None:
                self.cache.reorder(rows)
        self.rows = [self.rows[i] for i in rows]
        self.texts = self.texts[list(rows)]

    def _fresh(self) -> EncoderDecoderCache:
        return self.model.make_cache(self.memory, dtype=self.dtype)


@contextmanager
def _evaluating(model: EncoderDecoder) -> Iterator[None]:
    training = model.training
    try:
        model.train(False) if training else None
        with torch.inference_mode():
            yield
    finally:
        model.train(True) if training else None


def _asked(
    generation: Mapping[str, Any], settings: GenerationConfig, spec: ModelSpec
) -> tuple[int, GenerationConfig, TokenConstraints]:
    """What targets begin with; the settings, completed; and what they say of the tokens that may be taken."""
    for name, other in (("stop", ()), ("prefill_chunk", None)):
        if getattr(settings, name) != other:
            raise ConfigError(
                f"translate: {name}={getattr(settings, name)!r} has no effect on an encoder-decoder; leave it out"
            )
    start = _ids(generation, "decoder_start_token_id", spec)
    if len(start) != 1:
        raise ConfigError(
            "translate: generation_config.json must say which one id targets begin with, decoder_start_token_id; "
            f"got {generation.get('decoder_start_token_id')!r}"
        )
    eos = tuple(settings.eos) or _ids(generation, "eos_token_id", spec)
    pad = set(_ids(generation, "pad_token_id", spec)) - set(eos)
    forbidden = tuple(dict.fromkeys((*settings.forbidden, *_bad(generation), *sorted(pad))))
    given = settings.beams or Beams(1)
    first = _or_else(given.forced_first, generation, "forced_bos_token_id", spec)
    last = _or_else(given.forced_last, generation, "forced_eos_token_id", spec)
    beams = None if settings.beams is None else replace(given, forced_first=first, forced_last=last)
    rules = TokenConstraints(
        eos=frozenset(eos),
        forbidden=forbidden,
        repetition_penalty=settings.sampling.repetition_penalty,
        forced_first=first,
        forced_last=last,
    )
    return start[0], replace(settings, eos=eos, forbidden=forbidden, beams=beams), rules


def _or_else(given: int | None, generation: Mapping[str, Any], key: str, spec: ModelSpec) -> int | None:
    """What is given, else the id of a key."""
    ids = _ids(generation, key, spec) if given is None else (given,)
    if len(ids) > 1:
        raise ConfigError(f"translate: {key} lists {list(ids)}, and one id can be forced; say which")
    return ids[0] if ids else None


def _bad(generation: Mapping[str, Any]) -> list[int]:
    """Ids that generation_config.json forbids."""
    words = generation.get("bad_words_ids") or ()
    several = [word for word in words if len(word) != 1]
    if several:
        raise ConfigError(
            f"translate: bad_words_ids has {several[0]}, and only single ids can be forbidden; take it out"
        )
    return [word[0] for word in words]


def _ids(generation: Mapping[str, Any], key: str, spec: ModelSpec) -> tuple[int, ...]:
    """The id or ids of a key; () where it is absent."""
    value = generation.get(key)
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < spec.vocab:
            raise ConfigError(f"translate: {key} must be a token id in 0..{spec.vocab - 1}, got {i!r}")
    return ids


def _check_lengths(sources: list[list[int]], settings: GenerationConfig, spec: ModelSpec) -> None:
    limit = (
        spec.context_limit
        if settings.beyond_context
        else min(spec.trained_context, spec.context_limit or math.inf)
    )
    for i, source in enumerate(sources):
        if limit is not None and len(source) > limit:
            raise ConfigError(
                f"source {i} has {len(source)} tokens, and this model's encoder was made for {limit}; give a shorter "
                "one, or cut it into sentences"
            )


def _search(
    writer: Seq2SeqSession,
    count: int,
    start: int,
    room: int,
    requests: list[int],
    settings: GenerationConfig,
    beams: Beams,
) -> list[list[Hypothesis]]:
    return search(
        writer,
        writer.step(torch.full((count, 1), start)),
        [[start]] * count,
        beams,
        room=[room] * count,
        eos=settings.eos,
        forbidden=settings.forbidden,
        repetition_penalty=settings.sampling.repetition_penalty,
        requests=requests,
    )


def _sample(
    writer: Seq2SeqSession,
    count: int,
    start: int,
    room: int,
    requests: list[int],
    settings: GenerationConfig,
    rules: TokenConstraints,
) -> list[list[Hypothesis]]:
    """One text for each source, token by token; those that end leave the batch."""
    sampling = replace(settings.sampling, repetition_penalty=1.0)  # the rules apply it
    texts: list[list[int]] = [[] for _ in range(count)]
    live = list(range(count))
    logits = writer.step(torch.full((count, 1), start))
    while True:
        check_logits(logits, [(requests[i], len(texts[i])) for i in live])
        allowed = rules(logits.float(), [Text([start], texts[i], room) for i in live])
        if bool((allowed.amax(-1) == float("-inf")).any()):
            raise ConfigError("forbidden: no token is left to choose")
        noise = [uniform(settings.seed, requests[i], len(texts[i])) for i in live]
        chosen = sampling.choose(allowed, logits.new_zeros(0, dtype=torch.bool), noise).tolist()
        going = []
        for row, (i, token) in enumerate(zip(live, chosen, strict=True)):
            texts[i].append(token)
            if token not in rules.eos and len(texts[i]) < room:
                going.append(row)
        if not going:
            break
        if len(going) < len(live):
            writer.reorder(going)
            live = [live[row] for row in going]
        logits = writer.step(torch.tensor([[texts[i][-1]] for i in live]))
    ends: list[Reason] = ["eos" if ids[-1] in rules.eos else "length" for ids in texts]
    return [[Hypothesis(tuple(ids), (), 0.0, end)] for ids, end in zip(texts, ends, strict=True)]


def _read(text: Hypothesis, rules: TokenConstraints, tokenizer: Decodes | None) -> Hypothesis:
    """With its text."""
    if tokenizer is None:
        return text
    return replace(text, text=tokenizer.decode([i for i in text.ids if i not in rules.eos]))
