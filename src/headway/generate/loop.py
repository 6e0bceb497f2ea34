"""The generation loop: one for decoders and encoder-decoders, for sampling and for beams.

A batch of ragged prompts is read together; each step feeds every live row its last token, and what a draft expects to
follow it (`headway.generate.speculation`). Rows that end leave the batch. Row i of a batch is what row i is alone:
positions and masks belong to the row, noise to (seed, request, step), and settings to the request.

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
from headway.generate.drafts import Draft
from headway.generate.requests import Request, by_config, check_prompts, make_requests
from headway.generate.results import Delta, Generation, Hypothesis
from headway.generate.sampling import check_logits
from headway.generate.sequences import SampledText, choose_tokens, log_probs_of
from headway.generate.session import DecoderSession, Session
from headway.generate.speculation import Speculation, check_draft
from headway.models import Decoder
from headway.text import Tokenizer

Text = SampledText | BeamSearch
Decode = Callable[[Request, Sequence[int]], str]
"""The text of the new ids of a request, without EOS."""
Open = Callable[[Sequence[Request]], Session]
"""A session whose rows are those requests."""
Live = Sequence[tuple[Text, range]]
"""Texts in progress, and the rows of the logits that are theirs."""


def run(open_session: Open, texts: Sequence[Text], draft: Draft | None = None) -> Iterator[None]:
    """Adds tokens to every text, step by step, until each has ended; yields whenever texts got a token.

    Texts that get no token at all have no row in the session. With a draft, all are sampled, by a `DecoderSession`, and
    a text gets as many tokens of a step as come the way that its draft expected, and one more. Raises HeadwayError for
    logits that are no numbers, ConfigError when constraints leave no token to choose.
    """
    begun = time.perf_counter()
    some = [one for one in texts if one.request.max_new_tokens > 0]
    if not some:
        return
    requests = [one.request for one in some]
    session = open_session(requests)
    drafts: Speculation | None = None
    if draft is not None:
        assert isinstance(session, DecoderSession)
        drafts = Speculation(draft, session, requests)
    logits = session.start().unsqueeze(1)
    live = [(one, range(i, i + 1)) for i, one in enumerate(some)]
    while live:
        now, ahead = live, 0
        while now:
            _advance(logits[:, ahead], now, begun)
            yield
            now = [(one, rows) for one, rows in now if _is_read(one)]
            ahead += 1
        if drafts is not None:
            drafts.settle(_sampled(live))
        parents = [rows[row] for one, rows in live for row, _ in one.rows]
        ids = [[token] for one, _ in live for _, token in one.rows]
        ended, live = live, []
        for one, _ in ended:
            if one.rows:
                first = live[-1][1].stop if live else 0
                live.append((one, range(first, first + len(one.rows))))
        if live:
            if parents != list(range(len(logits))):
                session.reorder(parents)
                if drafts is not None:
                    drafts.reorder(parents)
            logits = session.step(ids) if drafts is None else drafts.step(_sampled(live))


def _advance(logits: Tensor, live: Live, begun: float) -> None:
    """A token more for each text, from its rows of the logits [R, V]; searches of one config are advanced together."""
    places = [(one.request.number, one.count) for one, rows in live for _ in rows]
    check_logits(_rows(logits, live), places)
    searches = [(one, rows) for one, rows in live if isinstance(one, BeamSearch)]
    for group in by_config([one.request for one, _ in searches]):
        some = [searches[i] for i in group]
        expand_beams(_rows(logits, some), [one for one, _ in some])
    sampled = [(one, rows) for one, rows in live if isinstance(one, SampledText)]
    chosen = choose_tokens(_rows(logits, sampled), [one for one, _ in sampled])
    for (one, rows), token in zip(sampled, chosen, strict=True):
        if token is None:
            raise ConfigError("forbidden: no token is left to choose")
        config = one.request.config
        told = log_probs_of(logits[rows[0]], token, config) if config.log_probs else ()
        one.advance(token, time.perf_counter() - begun, *told)


def _rows(logits: Tensor, live: Live) -> Tensor:
    """Of the logits [R, V], those of these texts."""
    rows = [row for _, rows in live for row in rows]
    return logits if rows == list(range(len(logits))) else logits[rows]


def _sampled(live: Live) -> list[SampledText]:
    return [one for one, _ in live if isinstance(one, SampledText)]


def _is_read(one: Text) -> bool:
    """Whether a text goes on, and the logits after its last token are there already."""
    return isinstance(one, SampledText) and one.follows and bool(one.rows)


def stream(
    model: Decoder,
    prompts: Sequence[Sequence[int] | Tensor],
    config: GenerationConfig | Sequence[GenerationConfig] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    requests: Sequence[int] | None = None,
    draft: Draft | None = None,
) -> Iterator[Delta]:
    """Generates for all prompts together, one Delta per new token, as they come.

    `config` is one for all, or one for each prompt. `requests` number the prompts (0, 1, ... unless given): the
    number decides a prompt's noise. `draft` guesses tokens, which saves steps where it is right and changes no text
    (`headway.generate.speculation`). Arguments are validated when this is called, before the first delta is asked for.
    Raises DataError for prompts that are no prompts, ConfigError for settings that cannot be; HeadwayError
    naming the step when the model returns logits that are no numbers.
    """
    asked = _requests(model, prompts, config, tokenizer, requests, draft)
    if any(request.config.beams is not None for request in asked):
        raise ConfigError(
            "stream: a beam search is certain of no token before its end; use generate, or leave out beams"
        )
    return _deltas(partial(_open, model, draft), asked, tokenizer, draft)


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int] | Tensor],
    config: GenerationConfig | Sequence[GenerationConfig] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    requests: Sequence[int] | None = None,
    batch_size: int | None = None,
    draft: Draft | None = None,
) -> list[Generation]:
    """One Generation per prompt, in their order: `stream`, collected, or the result of a search with beams.

    Arguments and errors as in `stream`. `batch_size`: at most so many prompts at once (all unless given); it does
    not change any text.
    """
    asked = _requests(model, prompts, config, tokenizer, requests, draft)

    def decode(request: Request, ids: Sequence[int]) -> str:
        return "" if tokenizer is None else tokenizer.decode(ids, after=request.prompt)

    opened = partial(_open, model, draft)
    return complete(opened, asked, decode, tokenizer=tokenizer, batch_size=batch_size, draft=draft)


def complete(
    open_session: Open,
    requests: Sequence[Request],
    decode: Decode,
    *,
    tokenizer: Tokenizer | None = None,
    batch_size: int | None = None,
    draft: Draft | None = None,
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
        for _ in run(open_session, texts, draft):
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
    )


def _open(model: Decoder, draft: Draft | None, requests: Sequence[Request]) -> Session:
    prompts, options = [request.prompt for request in requests], requests[0].config.session_options
    return DecoderSession(model, prompts, slack=0 if draft is None else draft.tokens, **options)


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
    return asked


def _deltas(
    open_session: Open, requests: Sequence[Request], tokenizer: Tokenizer | None, draft: Draft | None
) -> Iterator[Delta]:
    texts = [SampledText(request, tokenizer) for request in requests]
    sent = [0] * len(texts)
    for _ in chain([None], run(open_session, texts, draft)):
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
