"""Generation by a decoder, as a list or as a stream.

An engine generates the texts of a call: one that the caller keeps open, or a new one. Calls of several threads that use
the same open engine are batched together, and share the prefixes that earlier calls stored.
"""

import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from headway.cache import kv_dtype
from headway.errors import ConfigError, check_whole
from headway.generate.beams import BeamSearch
from headway.generate.config import GenerationConfig
from headway.generate.drafts import Draft, check_draft
from headway.generate.engine import Engine
from headway.generate.ranks import reader_of
from headway.generate.requests import Request, check_prompts, make_requests
from headway.generate.results import Delta, Generation, Hypothesis
from headway.generate.sequences import AnyTokenizer, Job, SampledText, decoded
from headway.hardware import memory_total
from headway.models import Decoder, EncoderDecoder
from headway.text import Tokenizer

AnyModel = Decoder | EncoderDecoder
SHARE = 16
"""Divisor of the machine's memory: a 16th is kept for prefixes unless `keep` is given."""
SAMPLES = 8
"""Numbers of each weight that `weights_of` reads."""


class OpenEngine:
    """One engine for all calls, as long as the model computes the same (`weights_of`).

    Any thread may call. A call with another model or other `session_options` than the call before opens a new engine;
    calls with a draft have engines of their own.

    Args:
        keep: bytes of keys and values that stay as prefixes for later texts (`prefix_cache`); a 16th of the machine's
            memory unless given. The cache may allocate twice as much.
    """

    def __init__(self, keep: int | None = None) -> None:
        self.keep = memory_total() // SHARE if keep is None else keep
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._of: Hashable = None

    def run(
        self, model: AnyModel, jobs: Sequence[Job], draft: Draft | None = None, most: int | None = None
    ) -> Iterator[None]:
        """Runs jobs as `Engine.run` does, in the open engine, or with a draft in one of their own."""
        config = jobs[0].request.config
        engine = self.engine(model, config) if draft is None else self._make(model, config, draft)
        return engine.run(jobs, most)

    def engine(self, model: AnyModel, config: GenerationConfig) -> Engine:
        """Returns the open engine, after replacing it if it does not fit the model and config."""
        key = tuple(config.session_options.items()), weights_of(model)
        with self._lock:
            if self._engine is None or self._of != key:
                self._engine, self._of = self._make(model, config), key
            return self._engine

    def _make(self, model: AnyModel, config: GenerationConfig, draft: Draft | None = None) -> Engine:
        """Returns a new engine for requests of this config; one with a draft serves a single call and keeps no
        prefixes."""
        dtype, keep = kv_dtype(config.kv_cache_dtype), self.keep if draft is None else 0
        options = {"use_cache": config.use_cache, "kv_dtype": dtype, "keep": keep, "exact": config.exact}
        return Engine(reader_of(model, **options), step_tokens=config.prefill_chunk, draft=draft)

    def close(self) -> None:
        """Drops the engine, whose memory is freed when the running calls have ended. A later call opens a new one."""
        with self._lock:
            self._engine = self._of = None

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenEngine, (self.keep,)


def weights_of(model: nn.Module) -> Hashable:
    """Returns a key that changes when the model's computation changes.

    It holds the tensors' addresses, shapes and versions, a few numbers of each (a change by `.data` or from outside of
    torch has no version), the active adapters and the hooks."""
    parts: list[Hashable] = []
    samples: list[Tensor] = []
    for module in model.modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        parts.append((id(module), getattr(module, "active", None), tuple(map(id, hooks))))
        for t in (*module._parameters.values(), *module._buffers.values()):
            if t is None:
                continue
            parts.append((t.data_ptr(), tuple(t.shape), 0 if t.is_inference() else t._version))
            flat = t.detach().flatten() if t.is_contiguous() else t.detach().reshape(-1)
            samples.append(flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].double())
    return tuple(parts), tuple(torch.cat(samples).tolist()) if samples else ()


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
    """Generates for all prompts together; yields one Delta per new token, as soon as it is chosen.

    `config` is one for all prompts, or one for each. `requests` numbers the prompts (0, 1, ... unless given): the
    number determines a prompt's random numbers. `draft` guesses tokens, which saves steps when it is right and changes
    no text (`headway.generate.drafts`). `engine` is an open engine of the model; a new one unless given. Arguments are
    validated when this is called, before the first delta is requested.

    Raises DataError for invalid prompts, ConfigError for impossible settings; HeadwayError, naming the step, if the
    model returns logits that are not finite.
    """
    checked = _requests(model, prompts, config, tokenizer, requests, draft)
    if any(request.config.beams is not None for request in checked):
        raise ConfigError(
            "stream: a beam search has no final token before its end; use generate, or leave out beams"
        )
    texts = [SampledText(request, tokenizer) for request in checked]

    def deltas() -> Iterator[Delta]:
        sent = [0] * len(texts)
        for _ in chain([None], (engine or OpenEngine(keep=0)).run(model, texts, draft)):
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
    """Returns one Generation per prompt, in their order: `stream`, collected, or the result of a beam search.

    Arguments and errors as in `stream`. `batch_size`: at most this many prompts at once (all unless given); it does not
    change any text.
    """
    checked = _requests(model, prompts, config, tokenizer, requests, draft)
    return complete(model, checked, tokenizer, batch_size=batch_size, draft=draft, engine=engine)


def complete(
    model: AnyModel,
    requests: Sequence[Request],
    tokenizer: AnyTokenizer | None = None,
    *,
    batch_size: int | None = None,
    draft: Draft | None = None,
    engine: OpenEngine | None = None,
) -> list[Generation]:
    """Returns one Generation per request, in their order; at most `batch_size` requests run at a time."""
    if batch_size is not None:
        check_whole("batch_size", batch_size)
    begun, jobs = time.perf_counter(), list[SampledText | BeamSearch]()
    for request in requests:
        beams = request.config.beams
        jobs.append(SampledText(request, tokenizer) if beams is None else BeamSearch(request, beams))
    for _ in (engine or OpenEngine(keep=0)).run(model, jobs, draft, batch_size):
        pass
    seconds = time.perf_counter() - begun
    return [
        _of_beams(job, tokenizer, seconds)
        if isinstance(job, BeamSearch)
        else collect(job.deltas, job.request.prompt_tokens)
        for job in jobs
    ]


def collect(deltas: Sequence[Delta], prompt_tokens: int) -> Generation:
    """Returns all deltas of one request as one Generation."""
    last = deltas[-1]
    assert last.finish_reason is not None
    ids = [d.token for d in deltas if d.token is not None]
    scored = [d for d in deltas if d.log_prob is not None]
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
        log_probs=tuple(d.log_prob for d in scored if d.log_prob is not None),
        top_log_probs=tuple(d.top_log_probs for d in scored if d.top_log_probs),
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
    checked = make_requests(check_prompts(prompts, model.spec.vocab), config, model.spec, numbers=numbers)
    if tokenizer is None and any(request.config.stop for request in checked):
        raise ConfigError("stop strings need a tokenizer, which turns token ids into text; pass tokenizer=")
    if draft is not None:
        check_draft(model, checked)
        draft.check(model, checked)
    return checked


def _of_beams(search: BeamSearch, tokenizer: AnyTokenizer | None, seconds: float) -> Generation:
    request = search.request
    best = search.best() if request.max_new_tokens else (Hypothesis((), (), 0.0, "length"),)
    best = tuple(replace(hypothesis, text=decoded(request, hypothesis.ids, tokenizer)) for hypothesis in best)
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
