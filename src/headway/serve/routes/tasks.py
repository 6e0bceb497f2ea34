"""What encoders and translators are asked, a path for each task."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from headway.serve.calls import Called
from headway.serve.errors import Json, warned
from headway.serve.inputs import TASKS, Task
from headway.serve.server import Server
from headway.serve.streams import unless_gone


def routes(server: Server) -> APIRouter:
    """A route for each task."""
    router = APIRouter()
    for task in TASKS:
        router.post(task.path, name=task.path)(_answering(server, task))
    return router


def _answering(server: Server, task: type[Task]) -> Callable[..., Awaitable[Response]]:
    async def answer(body: Any, request: Request) -> Response:
        model, warnings = await server.begin(body, Called, *task.tasks)  # type: ignore[type-abstract]
        content, tokens = await unless_gone(model.call(body.told), request)
        written = {name: content.pop(name) for name in ("completion_tokens",) if name in content}
        head = {
            "id": f"{task.path.removeprefix('/v1/')}-{uuid4().hex}",
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
