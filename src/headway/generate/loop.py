"""Generation by a decoder, as a list or as a stream.

An engine writes the texts of a call: the one that a caller keeps open, or one of its own.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from torch import Tensor

from headway.errors import ConfigError, check_whole
from headway.generate.beams import BeamSearch
from headway.generate.config import GenerationConfig
from headway.generate.drafts import Draft, check_draft
from headway.generate.open_engine import OpenEngine
from headway.generate.requests import Request, check_prompts, make_requests
from headway.generate.results import Delta, Generation, Hypothesis
from headway.generate.sequences import AnyTokenizer, SampledText, decoded
from headway.models import Decoder, EncoderDecoder
from headway.text import Tokenizer


def stream(
    model: Decoder,
    prompts: Sequence[Sequence[int] | Tensor],
    config: GenerationConfig | Sequence[GenerationConfig] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    requests: Sequence[int] | None = None,
    draft: Draft | None = None,
    engine: OpenEngine | None = None,
) -> Iterator[Delta]:
    """Generates for all prompts together, one Delta per new token, as they come.

    `config` is one for all, or one for each prompt. `requests` number the prompts (0, 1, ... unless given): the
    number decides a prompt's noise. `draft` guesses tokens, which saves steps where it is right and changes no text
    (`headway.generate.drafts`). `engine` is one of the model that is open; a new one unless given. Arguments are
    validated when this is called, before the first delta is asked for.

    Raises DataError for prompts that are no prompts, ConfigError for settings that cannot be; HeadwayError naming the
    step when the model returns logits that are no numbers.
    """
    asked = _requests(model, prompts, config, tokenizer, requests, draft)
    if any(request.config.beams is not None for request in asked):
        raise ConfigError(
            "stream: a beam search is certain of no token before its end; use generate, or leave out beams"
        )
    texts = [SampledText(request, tokenizer) for request in asked]

    def deltas() -> Iterator[Delta]:
        sent = [0] * len(texts)
        for _ in chain([None], (engine or OpenEngine(model, keep=0, once=True)).run(texts, draft)):
            for i, text in enumerate(texts):
                yield from text.deltas[sent[i] :]
                sent[i] = len(text.deltas)

    return deltas()


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int] | Tensor],
    config: GenerationConfig | Sequence[GenerationConfig] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    requests: Sequence[int] | None = None,
    batch_size: int | None = None,
    draft: Draft | None = None,
    engine: OpenEngine | None = None,
) -> list[Generation]:
    """One Generation per prompt, in their order: `stream`, collected, or the result of a search with beams.

    Arguments and errors as in `stream`. `batch_size`: at most so many prompts at once (all unless given); it does
    not change any text.
    """
    asked = _requests(model, prompts, config, tokenizer, requests, draft)
    return complete(model, asked, tokenizer, batch_size=batch_size, draft=draft, engine=engine)


def complete(
    model: Decoder | EncoderDecoder,
    requests: Sequence[Request],
    tokenizer: AnyTokenizer | None = None,
    *,
    batch_size: int | None = None,
    draft: Draft | None = None,
    engine: OpenEngine | None = None,
) -> list[Generation]:
    """One Generation per request, in their order, `batch_size` at a time."""
    if batch_size is not None:
        check_whole("batch_size", batch_size)
    begun, jobs = time.perf_counter(), list[SampledText | BeamSearch]()
    for request in requests:
        beams = request.config.beams
        jobs.append(SampledText(request, tokenizer) if beams is None else BeamSearch(request, beams))
    for _ in (engine or OpenEngine(model, keep=0, once=True)).run(jobs, draft, batch_size):
        pass
    seconds = time.perf_counter() - begun
    return [
        _of_beams(job, tokenizer, seconds)
        if isinstance(job, BeamSearch)
        else collect(job.deltas, job.request.prompt_tokens)
        for job in jobs
    ]


def collect(deltas: Sequence[Delta], prompt_tokens: int) -> Generation:
    """All deltas of one request as one value."""
    last = deltas[-1]
    assert last.finish_reason is not None
    ids = [d.token for d in deltas if d.token is not None]
    told = [d for d in deltas if d.log_prob is not None]
    return Generation(
        request=last.request,
        prompt_tokens=prompt_tokens,
        ids=ids,
        text="".join(d.text for d in deltas),
        finish_reason=last.finish_reason,
        seconds_to_first_token=deltas[0].seconds if ids else None,
        seconds=last.seconds,
        drafted=last.drafted,
        accepted=last.accepted,
        log_probs=tuple(d.log_prob for d in told if d.log_prob is not None),
        top_log_probs=tuple(d.top_log_probs for d in told if d.top_log_probs),
        prompt=deltas[0].prompt,
    )


def _requests(
    model: Decoder,
    prompts: Sequence[Sequence[int] | Tensor],
    config: GenerationConfig | Sequence[GenerationConfig] | None,
    tokenizer: Tokenizer | None,
    numbers: Sequence[int] | None,
    draft: Draft | None,
) -> list[Request]:
    asked = make_requests(check_prompts(prompts, model.spec.vocab), config, model.spec, numbers=numbers)
    if tokenizer is None and any(request.config.stop for request in asked):
        raise ConfigError("stop strings need a tokenizer: without one there is no text to find them in")
    if draft is not None:
        check_draft(model, asked)
        draft.check(model, asked)
    return asked


def _of_beams(search: BeamSearch, tokenizer: AnyTokenizer | None, seconds: float) -> Generation:
    request = search.request
    best = search.best() if request.max_new_tokens else (Hypothesis((), (), 0.0, "length"),)
    best = tuple(replace(one, text=decoded(request, one.ids, tokenizer)) for one in best)
    return Generation(
        request=request.number,
        prompt_tokens=request.prompt_tokens,
        ids=list(best[0].ids),
        text=best[0].text,
        finish_reason=best[0].finish_reason,
        seconds_to_first_token=None,
        seconds=seconds,
        hypotheses=best,
    )
