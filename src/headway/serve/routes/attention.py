"""Attention maps and next-token distributions with edges of the attention cut, as in the Python API, for the page."""

import codecs
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field
from torch import Tensor

from headway.api import Cut, Shares
from headway.cache import PAGE
from headway.errors import ConfigError, DataError
from headway.generate.requests import check_prompts
from headway.models.attention_maps import numbers_of
from headway.patterns import FATES, Or, Pattern, fates, visible
from headway.serve.answers import token_text
from headway.serve.bodies import ChatMessage, ModelRequest
from headway.serve.errors import Json, warned
from headway.serve.looks import Looking, check_size
from headway.serve.served import Decoding
from headway.serve.server import Server
from headway.serve.visits import own_salt
from headway.tokens import Tokens

SAMPLED = 64
"""Number of evenly spaced queries of a text over which a head's shares are averaged."""
LIKELY, MOST_CUTS = 10, 64
Told = dict[str, Any]
Tell = Callable[[Decoding, list[int], int, str], Told]


class LookedAt(ModelRequest):
    """A text (as text, token ids or a conversation) and one of its tokens; -1 is the last."""

    prompt: str | list[int] | None = None
    messages: list[ChatMessage] | None = None
    query: int = -1

    def ids(self, model: Decoding) -> list[int]:
        """Returns the token ids of the text. Raises ConfigError unless exactly one text is given, DataError if `query`
        is out of range."""
        tokenizer, prompt = model.lm.need_tokenizer(), self.prompt
        if (prompt is None) == (self.messages is None):
            raise ConfigError("attention takes one text: pass prompt (text or token ids) or messages")
        if self.messages is not None:
            prompt = tokenizer.render_chat([message.plain() for message in self.messages])
        ids = tokenizer.encode(prompt, eos=False) if isinstance(prompt, str) else prompt or []
        (checked,) = check_prompts([ids], model.lm.spec.vocab)
        if not -len(checked) <= self.query < len(checked):
            raise DataError(f"query={self.query} is outside the text's {len(checked)} tokens")
        return checked


class Row(LookedAt):
    """`POST /v1/attention`: a row of one head's attention map."""

    layer: int
    head: int


class WhatIf(LookedAt):
    """`POST /v1/what-if`: a text, and the attention edges to cut."""

    cuts: list[Cut] = Field(max_length=MOST_CUTS)


def routes(server: Server) -> APIRouter:
    """Returns the routes `/v1/attention`, `/v1/attention/heads`, `/v1/what-if`."""
    router, looking = APIRouter(prefix="/v1"), Looking()

    async def looked(body: LookedAt, request: Request, tell: Tell) -> Json:
        model, warnings = await server.begin(body, Decoding)
        salt = own_salt()  # read here: `look` runs in a thread without the request's context

        def look() -> Told:
            ids = body.ids(model)
            query = body.query % len(ids)
            return {"query": query, **tell(model, ids, query, salt)}

        return Json(await looking.run(look, request) | warned(warnings))

    @router.post("/attention/heads")
    async def heads(body: LookedAt, request: Request) -> Response:
        """Returns the tokens of a text, and for one of them the likeliest next tokens and where each head attends."""

        def tell(model: Decoding, ids: list[int], query: int, salt: str) -> Told:
            look = looking.at(model, ids, salt)
            maps, (at,) = look.maps(model, [query])
            with torch.inference_mode():
                log_probs = model.lm.model.logits(maps.last[at]).double().log_softmax(-1)
            return {
                "ids": ids,
                "tokens": _texts(model, ids),
                "next": [_token(model, token, log_prob=log_probs[token]) for token in _likely(log_probs)],
                "heads": [[_shares(head) for head in layer.shares([at])] for layer in maps.values()],
                "pages": _pages(model, ids, salt),
                "stored": look.stored,
                "computed": look.computed,
            }

        return await looked(body, request, tell)

    @router.post("/attention")
    async def attention(body: Row, request: Request) -> Response:
        """Returns the attention weights of one query in one head as a row over the text, with statistics."""

        def tell(model: Decoding, ids: list[int], query: int, salt: str) -> Told:
            (layer,) = numbers_of("layer", body.layer, model.lm.spec.layers)
            (head,) = numbers_of("head", body.head, model.lm.spec.heads)
            look = looking.at(model, ids, salt)
            maps, (at,) = look.maps(model, [query])
            chosen = replace(maps[layer], heads=(head,))
            weights, result = chosen.row(at)[0].double(), chosen.result(at)[0].double()
            difference = weights @ chosen.values(at)[0].double() - result
            spaced = range(len(ids) - 1, -1, -max(1, len(ids) // SAMPLED))[:SAMPLED]
            sampled = [number for number in reversed(spaced) if look.sees(number)] or [query]
            sampled_maps, slots = look.maps(model, sampled)
            return {
                "weights": weights.tolist(),
                "sum": float(weights.sum()),
                "difference": float(difference.abs().max()),
                "largest": float(result.abs().max()),
                "shares": _shares(*chosen.shares([at])),
                "mean_shares": _shares(*replace(sampled_maps[layer], heads=(head,)).shares(slots)),
                "sampled": sampled,
                "stored": look.stored,
                "computed": look.computed,
                **_seen(chosen.pattern, head, query, len(ids)),
            }

        return await looked(body, request, tell)

    @router.post("/what-if")
    async def what_if(body: WhatIf, request: Request) -> Response:
        """Returns the likeliest tokens after a token, with and without the cuts."""

        def tell(model: Decoding, ids: list[int], query: int, salt: str) -> Told:
            text = ids[: query + 1]
            check_size(model, len(text))
            with model.alone():
                before, after = (
                    model.lm.next_log_probs(text, cuts=cuts).double() for cuts in ((), body.cuts)
                )
            likely = dict.fromkeys([*_likely(before), *_likely(after)])
            return {
                "divergence": float((before.exp() * (before - after)).sum()),
                "tokens": [_token(model, i, before=before[i], after=after[i]) for i in likely],
            }

        return await looked(body, request, tell)

    return router


def _texts(model: Decoding, ids: list[int]) -> list[str]:
    """Returns the text that each token adds, so that together they read as the whole text; a character whose bytes span
    several tokens belongs to the last of them."""
    utf8, vocabulary = codecs.getincrementaldecoder("utf-8")("replace"), model.lm.need_tokenizer()
    return [utf8.decode(vocabulary.text_bytes(token, special=True) or b"") for token in ids]


def _likely(log_probs: Tensor) -> list[int]:
    tokens: list[int] = log_probs.topk(min(LIKELY, len(log_probs))).indices.tolist()
    return tokens


def _token(model: Decoding, token: int, **log_probs: Tensor) -> Told:
    values = {name: float(value) for name, value in log_probs.items()}
    return {"id": token, "token": token_text(model.lm.need_tokenizer(), token), **values}


def _shares(shares: Shares) -> Told:
    return {**shares._asdict(), "kind": shares.kind}


def _pages(model: Decoding, ids: list[int], salt: str) -> Told:
    """Returns the state of the text's pages under this salt, for each class of layers."""
    reader = model.engine.reader
    kinds = zip(reader.cache.pool.classes, reader.fates(ids, model.adapters, salt), strict=True)
    classes = [
        {
            "layers": [i for i, layer in enumerate(reader.cache.layers) if layer.of == number],
            "state": kind.state,
            "fates": states,
        }
        for number, (kind, states) in enumerate(kinds)
    ]
    return {"page": PAGE, "classes": classes}


def _seen(pattern: Pattern, head: int, query: int, count: int) -> Told:
    """Returns the fate of each key for the query, as runs [fate, first, end], and the runs of keys that each part of
    the head's pattern makes visible."""
    q, k = Tokens.range(1, query), Tokens.range(count)
    states = fates(pattern, q, k)[0]
    whole = pattern.heads[head] if len(pattern.heads) > 1 else pattern
    parts = whole.parts if isinstance(whole, Or) else (whole,)
    return {
        "pattern": str(whole),
        "retention": asdict(pattern.retention),
        "fates": [[FATES[fate], *run] for fate, run in _runs(states[head if len(states) > 1 else 0, 0])],
        "parts": [
            {"pattern": str(part), "runs": [run for sees, run in _runs(visible(part, q, k)[0, 0, 0]) if sees]}
            for part in parts
        ],
    }


def _runs(values: Tensor) -> list[tuple[int, tuple[int, int]]]:
    """Returns runs of equal values: the value, and (first, end)."""
    # 1 1 0: (1, (0, 2)), (0, (2, 3))
    runs, first = [], 0
    for value, run in groupby(values.tolist()):
        end = first + len(list(run))
        runs.append((int(value), (first, end)))
        first = end
    return runs
