"""llama.cpp's protocol: completions, gaps that are filled, and what the server is."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from headway import __version__
from headway.serve.llama import Infill, LlamaAnswer, LlamaCompletion
from headway.serve.served import Decoding
from headway.serve.server import Server
from headway.serve.streams import respond


def routes(server: Server) -> APIRouter:
    """`/completion` (`/completions`), `/infill`, `/props`, `/slots`."""
    router = APIRouter()

    async def write(body: LlamaCompletion, request: Request) -> Response:
        model, warnings = await server.begin(body, Decoding)
        ids = await asyncio.to_thread(body.ids, model.lm.need_tokenizer())
        room = None if model.context is None else max(0, model.context - max(map(len, ids), default=0))
        texts = model.texts(ids, body.config(model, room))
        return await respond(LlamaAnswer(model, texts, warnings, body), request, stream=body.stream)

    @router.post("/completion")
    @router.post("/completions")
    async def complete(body: LlamaCompletion, request: Request) -> Response:
        """Continues prompts."""
        return await write(body, request)

    @router.post("/infill")
    async def fill(body: Infill, request: Request) -> Response:
        """Fills the gap between two texts."""
        return await write(body, request)

    @router.get("/props")
    async def props(model: str | None = None) -> dict[str, Any]:
        """What a model is, and the settings that requests have unless they say otherwise."""
        found = await server.models.find(model, Decoding)
        defaults = LlamaCompletion.model_validate({"prompt": ""}).model_dump(exclude={"prompt", "model"})
        tokenizer = found.lm.need_tokenizer()
        template = tokenizer.chat_template
        return {
            "default_generation_settings": {"n_ctx": found.context, "params": defaults},
            "total_slots": server.worker.most,
            "model_alias": found.name,
            "chat_template": "" if template is None else template.source,
            "bos_token": "" if tokenizer.bos is None else tokenizer.token(tokenizer.bos),
            "eos_token": "" if tokenizer.eos is None else tokenizer.token(tokenizer.eos),
            "modalities": {"vision": False, "audio": False},
            "build_info": f"headway {__version__}",
        }

    @router.get("/slots")
    async def slots(model: str | None = None) -> list[dict[str, Any]]:
        """A row for each request that is being written, and one for the next; nothing of what they say."""
        context, count = (await server.models.find(model, Decoding)).context, server.worker.count
        return [
            {"id": i, "n_ctx": context, "is_processing": i < count}
            for i in range(min(count + 1, server.worker.most))
        ]

    return router
