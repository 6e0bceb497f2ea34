"""What encoders and translators are asked, a path for each task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from headway.serve.errors import Json, warned
from headway.serve.inputs import Answer, Classify, Embed, FillMask, Rerank, Score, Tag, Task, Translate
from headway.serve.server import Server
from headway.serve.streams import unless_gone

PATHS: dict[str, type[Task]] = {
    "/v1/embeddings": Embed,
    "/v1/rerank": Rerank,
    "/v1/score": Score,
    "/v1/classify": Classify,
    "/v1/tag": Tag,
    "/v1/fill-mask": FillMask,
    "/v1/answer": Answer,
    "/v1/translate": Translate,
}


def routes(server: Server) -> APIRouter:
    """A route for each path."""
    router = APIRouter()
    for path, task in PATHS.items():
        router.post(path, name=path)(_answering(server, task))
    return router


def _answering(server: Server, task: type[Task]) -> Callable[..., Awaitable[Response]]:
    async def answer(body: Any, request: Request) -> Response:
        model, warnings = await server.begin(body, task.kind)
        content, tokens = await unless_gone(model.call(body.told), request)
        written = (
            {"completion_tokens": content.pop("completion_tokens")} if "completion_tokens" in content else {}
        )
        head = {
            "id": f"{task.name}-{uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "usage": {"prompt_tokens": tokens, **written, "total_tokens": tokens + sum(written.values())},
            **warned(warnings),
        }
        return await asyncio.to_thread(Json, {**head, **content})

    answer.__annotations__ |= {"body": task, "request": Request}
    answer.__doc__ = task.__doc__
    return answer
