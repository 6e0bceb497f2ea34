"""Anthropic's protocol: messages."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from headway.serve import chats
from headway.serve.errors import warned
from headway.serve.messages import CountedMessages, MessageAnswer, Messages
from headway.serve.served import Decoding
from headway.serve.server import Server
from headway.serve.streams import STREAMED, respond


def routes(server: Server) -> APIRouter:
    """`/v1/messages` and its `count_tokens`."""
    router = APIRouter(prefix="/v1/messages")

    @router.post("", responses=STREAMED)
    async def answer(body: Messages, request: Request) -> Response:
        """Answers a conversation."""
        talk = await chats.begin(server, body.chat(), body)
        return await respond(MessageAnswer(talk), request, stream=body.stream)

    @router.post("/count_tokens")
    async def count_tokens(body: CountedMessages) -> dict[str, Any]:
        """The tokens of a conversation."""
        model, warnings = await server.begin(body, Decoding)
        ids = await chats.rendered(model, body.chat(), warnings)
        return {"input_tokens": len(ids), **warned(warnings)}

    return router
