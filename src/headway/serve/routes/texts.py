"""Texts that are written, in the shape of each protocol: a table of paths, bodies and answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from headway.serve import chats
from headway.serve.answers import Answer, Writing
from headway.serve.bodies import MOST_TEXTS, Chat, Completion, ModelRequest, TextRequest
from headway.serve.completions import ChatAnswer, CompletionAnswer, continued
from headway.serve.errors import warned
from headway.serve.llama import Infill, LlamaAnswer, LlamaCompletion, filled
from headway.serve.messages import CountedMessages, MessageAnswer, Messages
from headway.serve.responses import ResponseAnswer, Responses
from headway.serve.served import Decoding
from headway.serve.server import Server
from headway.serve.streams import STREAMED, respond, unless_gone, whole


class Written(NamedTuple):
    """A request, what makes texts of it, and how these are told."""

    body: type[TextRequest]
    begin: Callable[[Decoding, Any, list[str]], Awaitable[Writing]]
    answer: Callable[[Writing, Any], Answer]


WRITTEN = {
    "/v1/completions": Written(Completion, continued, CompletionAnswer),
    "/v1/chat/completions": Written(Chat, chats.answered, ChatAnswer),
    "/v1/responses": Written(Responses, chats.answered, ResponseAnswer),
    "/v1/messages": Written(Messages, chats.answered, MessageAnswer),
    "/completion": Written(LlamaCompletion, filled, LlamaAnswer),
    "/completions": Written(LlamaCompletion, filled, LlamaAnswer),
    "/infill": Written(Infill, filled, LlamaAnswer),
}
COUNTED: dict[str, type[TextRequest]] = {
    "/v1/chat/completions/input_tokens": Chat,
    "/v1/responses/input_tokens": Responses,
    "/v1/messages/count_tokens": CountedMessages,
}
"""Conversations whose tokens are counted."""


class Instance(BaseModel):
    """A request of Vertex AI: the body of another path of /v1, which its `@requestFormat` names (`chatCompletions`)."""

    model_config = ConfigDict(extra="allow")
    format: str = Field(alias="@requestFormat", pattern="^(chatCompletions|completions|responses|messages)$")

    @property
    def how(self) -> Written:
        """What it is there."""
        return WRITTEN["/v1/" + self.format.replace("chatC", "chat/c")]


class Predict(ModelRequest):
    """`POST /v1/predict`: Vertex AI's requests."""

    instances: list[Instance] = Field(min_length=1, max_length=MOST_TEXTS)


def routes(server: Server) -> APIRouter:
    """A route for each of them, and `/v1/models`."""
    router = APIRouter()

    async def begun(how: Written, body: TextRequest) -> Answer:
        """The answer to a request, of which nothing has been written yet."""
        body.check()
        model, warnings = await server.begin(body, Decoding)
        return how.answer(await how.begin(model, body, warnings), body)

    def writing(how: Written) -> Callable[..., Awaitable[Response]]:
        async def write(body: Any, request: Request) -> Response:
            return await respond(await begun(how, body), request)

        return write

    def counting() -> Callable[..., Awaitable[dict[str, Any]]]:
        async def count(body: Any) -> dict[str, Any]:
            model, warnings = await server.begin(body, Decoding)
            ids = (await chats.prepare(model, body, warnings))[1].ids
            return {"object": "response.input_tokens", "input_tokens": len(ids), **warned(warnings)}

        return count

    for path, body in [*((path, how.body) for path, how in WRITTEN.items()), *COUNTED.items()]:
        endpoint = writing(WRITTEN[path]) if path in WRITTEN else counting()
        endpoint.__annotations__ |= {"body": body, "request": Request}
        endpoint.__doc__ = body.__doc__
        router.post(path, name=path, responses=STREAMED if path in WRITTEN else {})(endpoint)

    @router.post("/v1/predict")
    async def predict(body: Predict, request: Request) -> dict[str, Any]:
        """What each instance is answered."""
        asked = [(each.how, {**(each.model_extra or {}), "stream": False}) for each in body.instances]
        answers = [await begun(how, how.body.model_validate(fields)) for how, fields in asked]
        return {"predictions": await unless_gone(asyncio.gather(*map(whole, answers)), request)}

    @router.get("/v1/models")
    def list_models() -> dict[str, Any]:
        """The models, by the names that requests give."""
        return {"object": "list", "data": [place.described for place in server.models.places.values()]}

    @router.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        """One of them."""
        return server.models.place(name).described

    return router
