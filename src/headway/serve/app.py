"""The routes of a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException

from headway.errors import HeadwayError
from headway.serve.answers import Answer, ChatAnswer
from headway.serve.bodies import Body, Chat, Completion
from headway.serve.errors import Json, shaped, tell_errors
from headway.serve.guard import Guard
from headway.serve.served import Models, Served
from headway.serve.worker import Worker

BEAT = 15.0
"""Seconds without a token after which a stream says that it is still there."""
BEAT = 15.0
"""Seconds without a token after which a stream says that it is still there."""


def make_app(models: Models, worker: Worker, *, strict: bool = False, **guard: Any) -> FastAPI:
    """A server of these models. `strict`: fields of requests that nothing knows are refused, where they are told in
    `warnings` otherwise. `guard`: what requests must be (`Guard`)."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        worker.close()

    app = FastAPI(title="headway", default_response_class=Json, lifespan=life)
    tell_errors(app)
    app.add_middleware(Guard, **guard)

    @app.get("/health")
    def health() -> dict[str, str]:
        """Whether the thread that writes lives."""
        if not worker.is_alive:
            raise HTTPException(503, "the thread of the engines has ended; restart the server")
        return {"status": "ok"}

    @app.get("/v1/models")
    def list_models() -> dict[str, Any]:
        """The models, by the names that requests give."""
        return {"object": "list", "data": [_described(model) for model in models.by_name.values()]}

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        """One of them."""
        return _described(models.find(name))

    @app.post("/v1/completions")
    async def complete(body: Completion, request: Request) -> Response:
        """Continues prompts."""
        served, warnings = _begin(models, body, strict)
        tokenizer = served.lm.need_tokenizer()
        ids = await asyncio.to_thread(
            lambda: [tokenizer.encode(p, eos=False) if isinstance(p, str) else p for p in body.prompts]
        )
        texts = served.texts(ids, body.config(), body.n)
        echoes: list[str] = []
        if body.echo:
            asked = [p if isinstance(p, str) else tokenizer.decode(p) for p in body.prompts]
            echoes = [prompt for prompt in asked for _ in range(body.n)]
        return await _answered(
            Answer(served, texts, likely=body.likely, echoes=echoes), body, request, warnings
        )

    @app.post("/v1/chat/completions")
    async def chat(body: Chat, request: Request) -> Response:
        """Answers a conversation."""
        served, warnings = _begin(models, body, strict)
        messages = [message.plain() for message in body.messages]
        ids = await asyncio.to_thread(served.lm.need_tokenizer().render_chat, messages)
        texts = served.texts([ids], body.config(), body.n)
        return await _answered(ChatAnswer(served, texts, likely=body.likely), body, request, warnings)

    return app


def _begin(models: Models, body: Body, strict: bool) -> tuple[Served, list[str]]:
    """The model of a request, and what is to be said of its fields."""
    body.check()
    if body.unknown and strict:
        raise HTTPException(400, f"unknown fields: {', '.join(body.unknown)}; leave them out")
    return models.find(body.model), [f"{name} is unknown here and changes nothing" for name in body.unknown]


async def _answered(answer: Answer, body: Body, request: Request, warnings: Sequence[str]) -> Response:
    """The whole answer, or a stream of its chunks. What never fits is refused before a stream begins."""
    news = answer.model.write(answer.texts)
    first = await _unless_gone(anext(news, []), request)
    if body.stream:
        options = body.stream_options
        usage = options is not None and options.include_usage
        return StreamingResponse(
            _chunks(answer, first, news, usage, warnings), media_type="text/event-stream"
        )

    async def rest() -> None:
        for i, delta in first:
            answer.add(i, delta)
        async for told in news:
            for i, delta in told:
                answer.add(i, delta)

    await _unless_gone(rest(), request)
    return Json({**answer.whole(), **({"warnings": list(warnings)} if warnings else {})})


async def _unless_gone(work: Any, request: Request) -> Any:
    """What work returns; cancelled when the client leaves, which is told as 499."""
    task = asyncio.ensure_future(work)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    leaves = asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, leaves), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise HTTPException(499, "the client has left")
        return task.result()
    finally:
        leaves.cancel()


async def _chunks(
    answer: Answer, first: Any, news: Any, usage: bool, warnings: Sequence[str]
) -> AsyncIterator[bytes]:
    """Server-sent events of an answer; a comment where nothing comes for long."""
    kind = {"object": f"{answer.kind}.chunk"} if isinstance(answer, ChatAnswer) else {}
    head = {**answer.head, **kind, **({"warnings": list(warnings)} if warnings else {})}
    none = {"usage": None} if usage else {}

    def events(told: Any) -> bytes:
        choices = [choice for i, delta in told if (choice := answer.add(i, delta)) is not None]
        return b"".join(_event({**head, "choices": [choice], **none}) for choice in choices)

    try:
        yield events(first)
        waiting = asyncio.ensure_future(anext(news, None))
        try:
            while True:
                done, _ = await asyncio.wait((waiting,), timeout=BEAT)
                if not done:
                    yield b": still here\n\n"
                    continue
                if (told := waiting.result()) is None:
                    break
                yield events(told)
                waiting = asyncio.ensure_future(anext(news, None))
        finally:
            waiting.cancel()
            await news.aclose() if waiting.done() else None
    except HeadwayError as error:
        yield _event(shaped(500, str(error)))
        return
    if usage:
        yield _event({**head, "choices": [], "usage": answer.usage})
    yield b"data: [DONE]\n\n"


def _event(content: Any) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def _described(model: Served) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "headway",
        "max_model_len": model.context,
    }
