"""A load generator for completions servers, in a process of its own, so that its CPU time is measured separately.

A plan comes in on stdin, as JSON, and the records of its requests go out on stdout. Requests are sent at their
scheduled times (an open loop: a slow server gets no relief), with a limit on the concurrent ones. Tokens are counted
by `usage`, not by pieces of the stream.
"""

import asyncio
import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ask:
    """A request: the body of `POST /v1/completions`, and when it is sent, in seconds from the beginning."""

    body: dict[str, Any]
    at: float = 0.0


@dataclass
class Told:
    """The record of a request: when it was sent, when each piece of text came, and the numbers of prompt tokens, of
    cached prompt tokens and of new tokens."""

    begun: float
    pieces: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    new: int = 0

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.pieces[0] - self.begun

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [after - before for before, after in zip(self.pieces, self.pieces[1:], strict=False)]


@dataclass(frozen=True)
class Load:
    """The records of a plan. `seconds` from the start to the last token; `cpu` seconds of the client."""

    told: list[Told]
    seconds: float
    cpu: float

    @property
    def rate(self) -> float:
        """New tokens per second."""
        return sum(record.new for record in self.told) / self.seconds


async def ask(port: int, body: dict[str, Any], start: float) -> Told:
    """Sends one request and returns its record; times are relative to `start`. Raises ValueError if the status is not
    200 or the answer is cut off."""
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    record = Told(time.perf_counter() - start)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        writer.write(head.encode() + content)
        status = await reader.readline()
        if b" 200" not in status:
            raise ValueError(
                f"{status.decode().strip()}: {(await reader.read()).decode(errors='replace')[-300:]}"
            )
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("choices"):
                record.pieces.append(time.perf_counter() - start)
            if usage := event.get("usage"):
                record.prompt, record.new = usage["prompt_tokens"], usage["completion_tokens"]
                record.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    finally:
        writer.close()
    if not (record.new and record.pieces):
        raise ValueError("the answer was cut off before its text or its usage")
    return record


async def run(port: int, asks: Sequence[Ask], most: int) -> Load:
    """Sends all requests of a plan, at most `most` at once."""
    slots, start, cpu = asyncio.Semaphore(most), time.perf_counter(), _cpu()

    async def answer(request: Ask) -> Told:
        await asyncio.sleep(request.at - (time.perf_counter() - start))
        async with slots:
            return await ask(port, request.body, start)

    records = await asyncio.gather(*map(answer, asks))
    return Load(records, max(request.pieces[-1] for request in records), _cpu() - cpu)


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def loaded(text: str) -> Load:
    """Parses the load that a client printed."""
    data = json.loads(text)
    return Load([Told(**fields) for fields in data["told"]], data["seconds"], data["cpu"])


if __name__ == "__main__":
    plan = json.load(sys.stdin)
    print(
        json.dumps(
            asdict(asyncio.run(run(plan["port"], [Ask(**each) for each in plan["asks"]], plan["most"])))
        )
    )
