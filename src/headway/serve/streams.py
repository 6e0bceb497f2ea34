"""Delivery of a response: as one body, or as server-sent events while it is generated."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from headway.serve.answers import Answer, Event
from headway.serve.errors import Json, Refused, encoded, explained
from headway.serve.visits import VISIT
from headway.serve.worker import Reading, Told

BEAT = 15.0
"""Seconds without an event after which a comment is sent to keep the stream alive."""
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""OpenAPI responses of a route that also streams."""
T = TypeVar("T")


async def respond(answer: Answer, request: Request) -> Response:
    """Returns the HTTP response. A stream begins with the first token, or after `BEAT` seconds: until then a request
    that cannot be served is answered with an error status. If the client disconnects, generation is cancelled."""
    if not answer.asked.stream:
        return Json(await unless_gone(whole(answer), request))
    news = answer.model.write(answer.texts, answer.asked.return_progress)
    first = asyncio.ensure_future(anext(news, None))
    try:
        if (await unless_gone(asyncio.wait((first,), timeout=BEAT), request))[0]:
            first.result()
    except BaseException:
        first.cancel()
        raise
    return StreamingResponse(_events(answer, first, news), media_type="text/event-stream")


async def whole(answer: Answer) -> Any:
    """Generates a whole response and returns its body."""
    async for update in answer.model.write(answer.texts):
        _add(answer, update)
    return answer.whole()


async def unless_gone(work: Awaitable[T], request: Request) -> T:
    """Returns the result of `work`; if the client disconnects it is cancelled, and Refused is raised with status
    499."""
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
            raise Refused("the client disconnected", 499)
        return task.result()
    finally:
        leaves.cancel()


async def _events(
    answer: Answer, waiting: asyncio.Future[Told | None], news: AsyncIterator[Told]
) -> AsyncIterator[bytes]:
    """Yields the events of a response, and a comment after every `BEAT` seconds without one."""
    try:
        try:
            yield sse(answer.begin())
            while True:
                done, _ = await asyncio.wait((waiting,), timeout=BEAT)
                if not done:
                    yield b": still here\n\n"
                    continue
                if (update := waiting.result()) is None:
                    break
                yield sse(_add(answer, update))
                waiting = asyncio.ensure_future(anext(news, None))
        finally:
            waiting.cancel()
            if waiting.done():
                await news.aclose()  # type: ignore[attr-defined]
        yield sse(answer.timed(answer.end()))
    except Exception as error:
        visit = VISIT.get()
        status, failure = explained(error, "a stream" if visit is None else visit.id)
        yield sse(answer.fail(status, failure["message"]))


def _add(answer: Answer, told: Told) -> list[Event]:
    events: list[Event] = []
    for i, news in told:
        is_reading = isinstance(news, Reading)
        events += [answer.progress(i, news)] if is_reading else answer.timed(answer.add(i, news))
    return events


def sse(events: Sequence[Event]) -> bytes:
    """Returns events as bytes of `text/event-stream`."""
    pieces = []
    for name, content in events:
        data = content.encode() if isinstance(content, str) else encoded(content)
        pieces += [b"event: %s\n" % name.encode() if name else b"", b"data: ", data, b"\n\n"]
    return b"".join(pieces)
