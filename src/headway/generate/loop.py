"""The generation loop: one for decoders and encoder-decoders, for sampling and for beams.

A batch of ragged prompts is read together; each step feeds every live row its last token. Rows that end leave
the batch. Row i of a batch is what row i is alone: positions and masks belong to the row, noise to
(seed, request, step), and settings to the request.

Legend: R live rows, V vocab.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from torch import Tensor

from headway.errors import ConfigError
from headway.generate.beams import BeamSearch, expand_beams
from headway.generate.config import GenerationConfig
from headway.generate.requests import Request, check_prompts, make_requests
from headway.generate.results import Delta, Generation, Hypothesis
from headway.generate.sampling import check_logits
from headway.generate.sequences import SampledText, choose_tokens
from headway.generate.session import DecoderSession, Session
from headway.models import Decoder
from headway.text import Tokenizer

Text = SampledText | BeamSearch
Decode = Callable[[Request, Sequence[int]], str]
"""The text of the new ids of a request, without EOS."""
Open = Callable[[Sequence[Request]], Session]
"""A session whose rows are those requests."""


def run(open_session: Open, texts: Sequence[Text]) -> Iterator[None]:
    """Adds a token to every text, step by step, until each has ended; yields after every step.

    Texts that get no token at all have no row in the session. Raises HeadwayError for logits that are no numbers,
    ConfigError when constraints leave no token to choose.
    """
    begun = time.perf_counter()
    some = [one for one in texts if one.request.max_new_tokens > 0]
    if not some:
        return
    session = open_session([one.request for one in some])
    logits, live = session.start(), [(one, range(i, i + 1)) for i, one in enumerate(some)]
    while live:
        check_logits(logits, [(one.request.number, one.count) for one, rows in live for _ in rows])
        _advance(logits, live, begun)
        yield
        parents = [rows[row] for one, rows in live for row, _ in one.rows]
        ids = [token for one, _ in live for _, token in one.rows]
        ended, live = live, []
        for one, _ in ended:
            if one.rows:
                first = live[-1][1].stop if live else 0
                live.append((one, range(first, first + len(one.rows))))
        if live:
            if parents != list(range(len(logits))):
                session.reorder(parents)
            logits = session.step(ids)


def _advance(logits: Tensor, live: Sequence[tuple[Text, range]], begun: float) -> None:
    """Texts of one config are advanced together; each has its rows of the logits [R, V]."""
    groups: dict[int, list[tuple[Text, range]]] = {}
    for one, rows in live:
        groups.setdefault(id(one.request.config), []).append((one, rows))
    for group in groups.values():
        values = logits if len(groups) == 1 else logits[[row for _, rows in group for row in rows]]
        sampled = [one for one, _ in group if isinstance(one, SampledText)]
        if sampled:
            chosen = choose_tokens(values.float(), sampled)
            for one, token in zip(sampled, chosen, strict=True):
                one.advance(token, time.perf_counter() - begun)
        else:
            expand_beams(values, [one for one, _ in group if isinstance(one, BeamSearch)])


def stream(
    model: Decoder,
    prompts: Sequence[Sequence[int] | Tensor],
    config: GenerationConfig | Sequence[GenerationConfig] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    requests: Sequence[int] | None = None,
) -> Iterator[Delta]:
    """Generates for all prompts together, one Delta per new token, as they come.

    `config` is one for all, or one for each prompt. `requests` number the prompts (0, 1, ... unless given): the
    number decides a prompt's noise. Arguments are validated when this is called, before the first delta is asked for.
    Raises DataError for prompts that are no prompts, ConfigError for settings that cannot be; HeadwayError
    naming the step when the model returns logits that are no numbers.
    """
    asked = _requests(model, prompts, config, tokenizer, requests)
    if any(request.config.beams is not None for request in asked):
        raise ConfigError(
            "stream: a beam search is certain of no token before its end; use generate, or leave out beams"
        )
    return _deltas(partial(_open, model), asked, tokenizer)


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int] | Tensor],
    config: GenerationConfig | Sequence[GenerationConfig] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    requests: Sequence[int] | None = None,
    batch_size: int | None = None,
) -> list[Generation]:
    """One Generation per prompt, in their order: `stream`, collected, or the result of a search with beams.

    Arguments and errors as in `stream`. `batch_size`: at most so many prompts at once (all unless given); it does
    not change any text.
    """
    asked = _requests(model, prompts, config, tokenizer, requests)

    def decode(request: Request, ids: Sequence[int]) -> str:
        return "" if tokenizer is None else tokenizer.decode(ids, after=request.prompt)

    return complete(partial(_open, model), asked, decode, tokenizer=tokenizer, batch_size=batch_size)


def complete(
    open_session: Open,
    requests: Sequence[Request],
    decode: Decode,
    *,
    tokenizer: Tokenizer | None = None,
    batch_size: int | None = None,
) -> list[Generation]:
    """One Generation per request, in their order, `batch_size` at once. With a tokenizer that can stream, sampled
    texts are decoded token by token; others, and those of beams, at the end."""
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"batch_size must be 1 or more, got {batch_size}")
    size, found = batch_size or len(requests), []
    for at in range(0, len(requests), size):
        begun = time.perf_counter()
        texts = [
            SampledText(one, tokenizer) if one.config.beams is None else BeamSearch(one, one.config.beams)
            for one in requests[at : at + size]
        ]
        for _ in run(open_session, texts):
            pass
        seconds = time.perf_counter() - begun
        for one in texts:
            if isinstance(one, BeamSearch):
                found.append(_of_beams(one, decode, seconds))
                continue
            made = collect(one.deltas, one.request.prompt_tokens)
            text = made.text if tokenizer else _decoded(one.request, made.ids, decode)
            found.append(replace(made, text=text))
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


def _open(model: Decoder, requests: Sequence[Request]) -> Session:
    config = requests[0].config
    return DecoderSession(model, [request.prompt for request in requests], **config.session_options)


def _requests(
    model: Decoder,
    prompts: Sequence[Sequence[int] | Tensor],
    config: GenerationConfig | Sequence[GenerationConfig] | None,
    tokenizer: Tokenizer | None,
    numbers: Sequence[int] | None,
) -> list[Request]:
    asked = make_requests(check_prompts(prompts, model.spec.vocab), config, model.spec, numbers=numbers)
    if tokenizer is None and any(request.config.stop for request in asked):
        raise ConfigError("stop strings need a tokenizer: without one there is no text to find them in")
    return asked


def _deltas(open_session: Open, requests: Sequence[Request], tokenizer: Tokenizer | None) -> Iterator[Delta]:
    texts = [SampledText(request, tokenizer) for request in requests]
    sent = [0] * len(texts)
    for _ in chain([None], run(open_session, texts)):
        for i, one in enumerate(texts):
            yield from one.deltas[sent[i] :]
            sent[i] = len(one.deltas)


def _of_beams(search: BeamSearch, decode: Decode, seconds: float) -> Generation:
    request = search.request
    best = search.best() if request.max_new_tokens else (Hypothesis((), (), 0.0, "length"),)
    best = tuple(replace(one, text=_decoded(request, one.ids, decode)) for one in best)
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


def _decoded(request: Request, ids: Sequence[int], decode: Decode) -> str:
    return decode(request, [i for i in ids if i not in request.config.eos])
