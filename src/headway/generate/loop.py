"""The generation loop.

A batch of ragged prompts is read together; each step feeds every live row its last token. Rows that end leave
the batch. Row i of a batch is what row i is alone: positions and masks belong to the row, and noise to
(seed, request, step).

Legend: B live rows, V vocab.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headway.cache import kv_dtype
from headway.errors import ConfigError
from headway.generate.beams import Beams, search
from headway.generate.config import GenerationConfig, check_prompts, rooms
from headway.generate.results import Delta, Generation, Hypothesis, Reason
from headway.generate.sampling import check_logits, uniform
from headway.generate.session import DecoderSession
from headway.generate.stop import StopScanner
from headway.models import Decoder
from headway.text import StreamDecoder, Tokenizer


class _Row:
    """A request in progress."""

    def __init__(
        self,
        request: int,
        prompt: list[int],
        room: int,
        settings: GenerationConfig,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request, self.room, self.settings = request, room, settings
        self.last, self.count = -1, 0
        self.decoder: StreamDecoder | None = tokenizer.stream(after=prompt) if tokenizer else None
        self.scanner = StopScanner(settings.stop)

    def take(self, token: int) -> tuple[str, Reason | None]:
        """Adds a token; returns the text that may be shown, and why the row ends if it does."""
        self.last, self.count = token, self.count + 1
        reason: Reason | None = None
        text = ""
        if token in self.settings.eos:
            reason = "eos"
        else:
            if self.decoder is not None:
                text = self.scanner.push(self.decoder.push(token))
            if self.scanner.hit is not None:
                return text, "stop"
            if self.count == self.room:
                reason = "length"
        if reason is not None and self.decoder is not None:
            text += self.scanner.push(self.decoder.flush())
            if self.scanner.hit is not None:
                return text, "stop"
            text += self.scanner.flush()
        return text, reason


def stream(
    model: Decoder,
    prompts: Sequence[Sequence[int] | Tensor],
    settings: GenerationConfig | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    requests: Sequence[int] | None = None,
) -> Iterator[Delta]:
    """Generates for all prompts together, one Delta per new token, as they come.

    `requests` number the prompts (0, 1, ... unless given): the number decides a prompt's noise. Arguments are
    checked when this is called, before the first delta is asked for.
    Raises DataError for prompts that are no prompts, ConfigError for settings that cannot be; HeadwayError
    naming the step when the model returns logits that are no numbers.
    """
    settings = settings or GenerationConfig()
    if settings.beams is not None:
        raise ConfigError(
            "stream: a beam search is certain of no token before its end; use generate, or leave out beams"
        )
    return _run(model, *_checked(model, prompts, settings, tokenizer, requests), settings, tokenizer)


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int] | Tensor],
    settings: GenerationConfig | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    requests: Sequence[int] | None = None,
    batch_size: int | None = None,
) -> list[Generation]:
    """One Generation per prompt, in their order: `stream`, collected, or the outcome of a search with
    `settings.beams`.

    `batch_size`: at most so many prompts at once (all unless given); it does not change any text.
    """
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"batch_size must be 1 or more, got {batch_size}")
    settings = settings or GenerationConfig()
    ids, numbers, room = _checked(model, prompts, settings, tokenizer, requests)
    size = batch_size or len(ids)
    found: list[Generation] = []
    for at in range(0, len(ids), size):
        part, names = ids[at : at + size], numbers[at : at + size]
        if len(set(names)) != len(part):
            raise ConfigError(f"requests must differ from each other, one per prompt, got {names}")
        work = (model, part, names, room[at : at + size], settings, tokenizer)
        if settings.beams is not None:
            found += _search(*work, settings.beams)
            continue
        deltas: dict[int, list[Delta]] = {n: [] for n in names}
        for delta in _run(*work):
            deltas[delta.request].append(delta)
        found += [collect(deltas[n], len(prompt)) for n, prompt in zip(names, part, strict=True)]
    return found


def collect(deltas: Sequence[Delta], prompt_tokens: int) -> Generation:
    """All deltas of one request as one value."""
    last = deltas[-1]
    assert last.finish_reason is not None
    ids = [d.token for d in deltas if d.token is not None]
    return Generation(
        request=last.request,
        prompt_tokens=prompt_tokens,
        ids=ids,
        text="".join(d.text for d in deltas),
        finish_reason=last.finish_reason,
        seconds_to_first_token=deltas[0].seconds if ids else None,
        seconds=last.seconds,
    )


def _checked(
    model: Decoder,
    prompts: Sequence[Sequence[int] | Tensor],
    settings: GenerationConfig,
    tokenizer: Tokenizer | None,
    requests: Sequence[int] | None,
) -> tuple[list[list[int]], list[int], list[int]]:
    """The prompts' ids, their numbers, and how many new tokens each may get."""
    vocab = model.spec.vocab
    ids = check_prompts(prompts, vocab)
    numbers = list(range(len(ids))) if requests is None else list(requests)
    if len(numbers) != len(ids):
        raise ConfigError(f"requests: {len(numbers)} numbers for {len(ids)} prompts")
    if settings.stop and tokenizer is None:
        raise ConfigError("stop strings need a tokenizer: without one there is no text to find them in")
    named = {"forbidden": settings.forbidden}
    if settings.beams is not None:
        for name in ("forced_first", "forced_last"):
            token = getattr(settings.beams, name)
            named[f"beams: {name}"] = () if token is None else (token,)
    for name, tokens in named.items():
        bad = [i for i in tokens if not 0 <= i < vocab]
        if bad:
            raise ConfigError(f"{name}: token id {bad[0]} is outside the model's vocabulary of {vocab}")
    return ids, numbers, rooms(ids, settings, model.spec)


def _reader(model: Decoder, rows: int, settings: GenerationConfig) -> DecoderSession:
    stored = kv_dtype(settings.kv_cache_dtype)
    return DecoderSession(model, rows, use_cache=settings.use_cache, kv_dtype=stored)


def _search(
    model: Decoder,
    prompts: list[list[int]],
    requests: list[int],
    room: list[int],
    settings: GenerationConfig,
    tokenizer: Tokenizer | None,
    beams: Beams,
) -> list[Generation]:
    begun = time.perf_counter()
    texts = [[Hypothesis((), (), 0.0, "length")] for _ in prompts]
    live = [i for i, n in enumerate(room) if n > 0]
    if live:
        started = [prompts[i] for i in live]
        reader = _reader(model, len(live), settings)
        found = search(
            reader,
            reader.read(started, settings.prefill_chunk),
            started,
            beams,
            room=[room[i] for i in live],
            eos=settings.eos,
            forbidden=settings.forbidden,
            repetition_penalty=settings.sampling.repetition_penalty,
            requests=[requests[i] for i in live],
        )
        for i, best in zip(live, found, strict=True):
            texts[i] = [_told(text, prompts[i], settings, tokenizer) for text in best]
    seconds = time.perf_counter() - begun
    return [
        Generation(
            request=request,
            prompt_tokens=len(prompt),
            ids=list(best[0].ids),
            text=best[0].text,
            finish_reason=best[0].finish_reason,
            seconds_to_first_token=None,
            seconds=seconds,
            hypotheses=tuple(best),
        )
        for request, prompt, best in zip(requests, prompts, texts, strict=True)
    ]


def _told(
    text: Hypothesis, prompt: list[int], settings: GenerationConfig, tokenizer: Tokenizer | None
) -> Hypothesis:
    """With its text."""
    if tokenizer is None:
        return text
    ids = [i for i in text.ids if i not in settings.eos]
    return replace(text, text=tokenizer.decode(ids, after=prompt))


def _run(
    model: Decoder,
    prompts: list[list[int]],
    requests: list[int],
    room: list[int],
    settings: GenerationConfig,
    tokenizer: Tokenizer | None,
) -> Iterator[Delta]:
    begun = time.perf_counter()
    every = zip(requests, prompts, room, strict=True)
    for request, _, n in every:
        if n == 0:
            yield Delta(request, None, "", "length", time.perf_counter() - begun)
    live = [i for i, n in enumerate(room) if n > 0]
    if not live:
        return
    rows = [_Row(requests[i], prompts[i], room[i], settings, tokenizer) for i in live]
    history = _History(model, [prompts[i] for i in live], settings)
    reader = _reader(model, len(rows), settings)
    logits = reader.read([prompts[i] for i in live], settings.prefill_chunk)
    while True:
        tokens = history.choose(logits, rows)
        going = []
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            text, reason = row.take(token)
            yield Delta(row.request, token, text, reason, time.perf_counter() - begun)
            if reason is None:
                going.append(i)
        if not going:
            return
        if len(going) < len(rows):
            rows = [rows[i] for i in going]
            reader.reorder(going)
            history.keep(going)
        logits = reader.read([[row.last] for row in rows])


class _History:
    """Chooses tokens, and remembers which each row has when the sampling needs it."""

    def __init__(self, model: Decoder, prompts: list[list[int]], settings: GenerationConfig) -> None:
        self.settings = settings
        device = model.model.embedding.device
        self.forbidden = torch.tensor(list(settings.forbidden), dtype=torch.int64, device=device)
        needed = settings.sampling.needs_history
        self.seen = torch.zeros(
            len(prompts) if needed else 0, model.spec.vocab, dtype=torch.bool, device=device
        )
        for seen, prompt in zip(self.seen, prompts, strict=False):
            seen[torch.tensor(prompt, device=device)] = True

    def choose(self, logits: Tensor, rows: list[_Row]) -> list[int]:
        check_logits(logits, [(row.request, row.count) for row in rows])
        logits = logits.index_fill(-1, self.forbidden, float("-inf"))
        if bool((logits.amax(-1) == float("-inf")).any()):
            raise ConfigError("forbidden: no token is left to choose")
        noise = [uniform(self.settings.seed, row.request, row.count) for row in rows]
        chosen = self.settings.sampling.choose(logits, self.seen, noise)
        if len(self.seen):
            self.seen.scatter_(1, chosen.unsqueeze(1), True)
        tokens: list[int] = chosen.tolist()
        return tokens

    def keep(self, rows: list[int]) -> None:
        if len(self.seen):
            self.seen = self.seen[rows]
