"""An answer on its way to the client: whole, or as server-sent events while it is written."""

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
"""Seconds without an event after which a comment says that the stream lives."""
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""The responses of a route that answers whole, or by events."""
T = TypeVar("T")


async def respond(answer: Answer, request: Request) -> Response:
    """The answer to a request. What never fits is refused before a stream begins, which is with the first token, or
    where that takes long before it; when the client leaves, what is being written for it is cancelled."""
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
    """An answer when all of it has been written."""
    async for told in answer.model.write(answer.texts):
        _add(answer, told)
    return answer.whole()


async def unless_gone(work: Awaitable[T], request: Request) -> T:
    """Returns the result of `work`; it is cancelled when the client leaves, which is answered with 499."""
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
            raise Refused("the client has left", 499)
        return task.result()
    finally:
        leaves.cancel()


async def _events(
    answer: Answer, waiting: asyncio.Future[Told | None], news: AsyncIterator[Told]
) -> AsyncIterator[bytes]:
    """The events of an answer; a comment where none comes for long."""
    try:
        try:
            yield sse(answer.begin())
            while True:
                done, _ = await asyncio.wait((waiting,), timeout=BEAT)
                if not done:
                    yield b": still here\n\n"
                    continue
                if (told := waiting.result()) is None:
                    break
                yield sse(_add(answer, told))
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
    """Events as bytes of a `text/event-stream`."""
    pieces = []
    for name, content in events:
        data = content.encode() if isinstance(content, str) else encoded(content)
        pieces += [b"event: %s\n" % name.encode() if name else b"", b"data: ", data, b"\n\n"]
    return b"".join(pieces)
