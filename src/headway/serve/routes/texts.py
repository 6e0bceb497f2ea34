"""Routes of requests to models: generation in the format of each protocol, and tasks of encoders and translators."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from headway.serve import chats
from headway.serve.answers import Answer
from headway.serve.bodies import MOST_TEXTS, Chat, Completion, ModelRequest, TextRequest
from headway.serve.calls import Called
from headway.serve.completions import ChatAnswer, CompletionAnswer, continued
from headway.serve.errors import Json, warned
from headway.serve.inputs import TASKS, Task
from headway.serve.llama import Infill, LlamaAnswer, LlamaCompletion, filled
from headway.serve.messages import CountedMessages, MessageAnswer, Messages
from headway.serve.responses import ResponseAnswer, Responses
from headway.serve.served import Decoding
from headway.serve.server import Server
from headway.serve.streams import STREAMED, respond, unless_gone, whole


class Exchange(NamedTuple):
    """The class of a request body, the function that begins its response, and the class of the response."""

    body: type[TextRequest]
    begin: Callable[[type[Answer], Decoding, Any, list[str]], Awaitable[Answer]]
    answer: type[Answer]


WRITTEN = {
    "/v1/completions": Exchange(Completion, continued, CompletionAnswer),
    "/v1/chat/completions": Exchange(Chat, chats.answered, ChatAnswer),
    "/v1/responses": Exchange(Responses, chats.answered, ResponseAnswer),
    "/v1/messages": Exchange(Messages, chats.answered, MessageAnswer),
    "/completion": Exchange(LlamaCompletion, filled, LlamaAnswer),
    "/completions": Exchange(LlamaCompletion, filled, LlamaAnswer),
    "/infill": Exchange(Infill, filled, LlamaAnswer),
}
COUNTED: dict[str, type[TextRequest]] = {
    "/v1/chat/completions/input_tokens": Chat,
    "/v1/responses/input_tokens": Responses,
    "/v1/messages/count_tokens": CountedMessages,
}
"""Paths that count the tokens of a conversation."""


class Instance(BaseModel, extra="allow"):
    """A request of Vertex AI: the body of another path of /v1, which its `@requestFormat` names (`chatCompletions`)."""

    format: str = Field(alias="@requestFormat", pattern="^(chatCompletions|completions|responses|messages)$")


class Predict(ModelRequest):
    """`POST /v1/predict`: requests of Vertex AI."""

    instances: list[Instance] = Field(min_length=1, max_length=MOST_TEXTS)


def routes(server: Server) -> APIRouter:
    """Returns a route for each of these, `/v1/predict` and `/v1/models`."""
    router = APIRouter()

    async def begun(how: Exchange, body: TextRequest) -> Answer:
        """Returns the response to a request, not yet generated."""
        body.check()
        model, warnings = await server.begin(body, Decoding)
        return await how.begin(how.answer, model, body, warnings)

    async def write(how: Exchange, body: TextRequest, request: Request) -> Response:
        return await respond(await begun(how, body), request)

    async def count(body: Any, request: Request) -> Response:
        model, warnings = await server.begin(body, Decoding)
        ids = (await chats.prepare(model, body, warnings)).ids
        return Json({"object": "response.input_tokens", "input_tokens": len(ids), **warned(warnings)})

    async def call(body: Task, request: Request) -> Response:
        model, warnings = await server.begin(body, Called, *body.tasks)  # type: ignore[type-abstract]
        content, tokens = await unless_gone(model.call(body.told), request)
        written = {name: content.pop(name) for name in ("completion_tokens",) if name in content}
        head = {
            "id": f"{body.path.removeprefix('/v1/')}-{uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "usage": {"prompt_tokens": tokens, **written, "total_tokens": tokens + sum(written.values())},
            **warned(warnings),
        }
        return await asyncio.to_thread(Json, {**head, **content})

    def post(
        path: str, kind: type[ModelRequest], answer: Callable[..., Awaitable[Response]], **more: Any
    ) -> None:
        """Adds a route for bodies of a class, whose docstring becomes the route's."""

        async def endpoint(body: Any, request: Request) -> Response:
            return await answer(body, request)

        endpoint.__annotations__["body"], endpoint.__doc__ = kind, kind.__doc__
        router.post(path, name=path, **more)(endpoint)

    for path, how in WRITTEN.items():
        post(path, how.body, partial(write, how), responses=STREAMED)
    for path, conversation in COUNTED.items():
        post(path, conversation, count)
    for task in TASKS:
        post(task.path, task, call)

    @router.post("/v1/predict")
    async def predict(body: Predict, request: Request) -> dict[str, Any]:
        """Returns the response to each instance."""
        answers = []
        for each in body.instances:
            how = WRITTEN["/v1/" + each.format.replace("chatC", "chat/c")]
            instance = how.body.model_validate({**(each.model_extra or {}), "stream": False})
            answers.append(await begun(how, instance))
        return {"predictions": await unless_gone(asyncio.gather(*map(whole, answers)), request)}

    @router.get("/v1/models")
    def list_models() -> dict[str, Any]:
        """Returns the models, by the names that requests give."""
        return {"object": "list", "data": [place.described for place in server.models.places.values()]}

    @router.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        """Returns one of the models."""
        return server.models.place(name).described

    return router
