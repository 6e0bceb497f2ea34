"""OpenAI's protocol: models, completions, chat completions, responses."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from headway.serve import chats
from headway.serve.bodies import Chat, Completion, TextRequest
from headway.serve.completions import ChatAnswer, CompletionAnswer
from headway.serve.errors import warned
from headway.serve.responses import ResponseAnswer, Responses
from headway.serve.served import Decoding
from headway.serve.server import Server
from headway.serve.streams import STREAMED, respond
from headway.text import Tokenizer, infill


def routes(server: Server) -> APIRouter:
    """`/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/v1/responses`."""
    router = APIRouter(prefix="/v1")

    @router.get("/models")
    def list_models() -> dict[str, Any]:
        """The models, by the names that requests give."""
        return {"object": "list", "data": [place.described for place in server.models.places.values()]}

    @router.get("/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        """One of them."""
        return server.models.place(name).described

    @router.post("/completions", responses=STREAMED)
    async def complete(body: Completion, request: Request) -> Response:
        """Continues prompts."""
        body.check()
        model, warnings = await server.begin(body, Decoding)
        tokenizer = model.lm.need_tokenizer()
        ids = await asyncio.to_thread(
            lambda: [prompt_ids(tokenizer, prompt, body.suffix) for prompt in body.prompts]
        )
        config = body.config(grammar=await model.grammar(body.asked_grammar))
        texts = model.texts(ids, config, body.n)
        echoes: list[str] = []
        if body.echo:
            asked = [p if isinstance(p, str) else tokenizer.decode(p) for p in body.prompts]
            echoes = [prompt for prompt in asked for _ in range(body.n)]
        answer = CompletionAnswer(
            model,
            texts,
            warnings,
            likely=body.likely,
            echoes=echoes,
            usage=body.tells_usage,
            ids=body.return_token_ids,
        )
        return await respond(answer, request, stream=body.stream)

    @router.post("/chat/completions", responses=STREAMED)
    async def chat(body: Chat, request: Request) -> Response:
        """Answers a conversation."""
        talk = await chats.begin(server, body, body)
        answer = ChatAnswer(
            talk.model,
            talk.texts,
            talk.warnings,
            reader=talk.reader,
            likely=body.likely,
            usage=body.tells_usage,
            ids=body.return_token_ids,
        )
        return await respond(answer, request, stream=body.stream)

    @router.post("/responses", responses=STREAMED)
    async def respond_to(body: Responses, request: Request) -> Response:
        """Answers a conversation, as a list of items."""
        talk = await chats.begin(server, body.chat(), body)
        return await respond(ResponseAnswer(talk, body.told), request, stream=body.stream)

    async def counted(asked: TextRequest, body: Chat) -> dict[str, Any]:
        model, warnings = await server.begin(asked, Decoding)
        ids = await chats.rendered(model, body, warnings)
        return {"object": "response.input_tokens", "input_tokens": len(ids), **warned(warnings)}

    @router.post("/chat/completions/input_tokens")
    async def count_chat(body: Chat) -> dict[str, Any]:
        """The tokens of a conversation."""
        return await counted(body, body)

    @router.post("/responses/input_tokens")
    async def count_items(body: Responses) -> dict[str, Any]:
        """The tokens of a conversation, as a list of items."""
        return await counted(body, body.chat())

    return router


def prompt_ids(tokenizer: Tokenizer, prompt: str | list[int], suffix: str | None) -> list[int]:
    """Ids of a prompt that is continued, up to a suffix if there is one. Raises DataError as `infill`."""
    if suffix:
        before = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        return infill(tokenizer, before, suffix)
    return tokenizer.encode(prompt, eos=False) if isinstance(prompt, str) else prompt
