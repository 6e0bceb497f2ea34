"""Requests of which a fifth are cut, malformed, oversized, slow, or without a key: the others get their usual
answers, and nothing is left behind."""

import asyncio
import gc
import json
from collections import Counter
from random import Random
from typing import Any
from urllib.parse import urlsplit

import pytest

from headway.serve.visits import Key
from tests.memory import resident
from tests.serve.conftest import House, serving, settles

KEY = "the-key"
REFUSED = (200, 400, 401, 403, 404, 405, 408, 413, 431, 0)
"""Statuses for spoiled bytes, which may be valid by chance; 0 is no answer, and 500 never happens."""
EXPECTED = {"cut": (0,), "malformed": REFUSED, "oversized": (413, 0), "key": (401,)}
PROMPTS = ["the cat", "sat on the mat " * 5, "a", "where is it? " * 12]


def message(body: bytes, key: str = KEY, path: str = "/v1/completions", more: str = "") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    return f"{head}X-Api-Key: {key}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


def good(draw: Random) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": draw.choice(PROMPTS), "max_tokens": draw.choice([1, 4, 9]), "seed": 3}
    return {**body, "stream": draw.random() < 0.4, "n": draw.choice([1, 1, 2])}


def malformed(draw: Random) -> bytes:
    """Returns bytes that are no request, or not one that can be answered."""
    whole = message(json.dumps(good(draw)).encode())
    kind = draw.randrange(6)
    if kind == 0:  # some bytes are replaced
        spoiled = bytearray(whole)
        for _ in range(draw.randint(1, 8)):
            spoiled[draw.randrange(len(whole))] = draw.randrange(256)
        return bytes(spoiled).replace(b'"max_tokens": ', b'"max_tokens": -')
    bodies = [b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "x", "n": 1e9}', b"\xff" * 30]
    if kind == 1:
        return message(draw.choice(bodies))
    if kind == 2:
        return message(b"{}", path=draw.choice(["/v1/none", "/../../etc/passwd", "/health", "/%00"]))
    if kind == 3:
        return draw.randbytes(draw.randint(1, 200)) + b"\r\n\r\n"
    if kind == 4:
        return message(b"{}", more="x: " + "y" * 70_000 + "\r\n")
    return whole.replace(b"Content-Length: ", b"Content-Length: -")


async def send(house: House, draw: Random) -> tuple[str, int, dict[str, Any] | None, bytes]:
    """Sends a request; returns its kind, the answer's status (0: none), the body if it was whole, and the answer."""
    kind = draw.choice(["cut", "malformed", "oversized", "slow", "key"]) if draw.random() < 0.2 else "good"
    body = good(draw)
    data = message(json.dumps(body).encode(), key="wrong" if kind == "key" else KEY)
    if kind == "malformed":
        data = malformed(draw)
    if kind == "oversized":
        data = message(json.dumps({"prompt": "x" * 70_000}).encode())
    reader, writer = await asyncio.open_connection(urlsplit(house.url).hostname, urlsplit(house.url).port)
    answer = b""
    try:
        if kind == "cut":  # in the head, in the body, or while the answer is sent
            at = draw.randrange(1, len(data) + 1)
            writer.write(data[:at])
            await writer.drain()
            if at == len(data) or draw.random() < 0.3:
                await asyncio.sleep(draw.random() * 0.02)
            writer.transport.abort()
            return kind, 0, None, answer
        for piece in [data[i : i + 60] for i in range(0, len(data), 60)] if kind == "slow" else [data]:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.002 if kind == "slow" else 0)
        async with asyncio.timeout(60):
            answer = await reader.read()
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    status = int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0
    return kind, status, body, answer


def texts(answer: bytes, stream: bool) -> list[str]:
    """Returns the texts of an answer, in order."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"chunked" in head:
        pieces, remaining = b"", body
        while remaining:
            size, _, remaining = remaining.partition(b"\r\n")
            pieces, remaining = pieces + remaining[: int(size, 16)], remaining[int(size, 16) + 2 :]
        body = pieces
    if not stream:
        return [choice["text"] for choice in json.loads(body)["choices"]]
    by_index: dict[int, str] = {}
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            by_index[choice["index"]] = by_index.get(choice["index"], "") + choice["text"]
    return [by_index[i] for i in sorted(by_index)]


async def storm(house: House, count: int, at_once: int, seed: int) -> Counter[tuple[str, int]]:
    gate, counts = asyncio.Semaphore(at_once), Counter[tuple[str, int]]()
    known: dict[str, list[str]] = {}

    async def send_one(number: int) -> None:
        async with gate:
            kind, status, body, answer = await send(house, Random(seed * 100_003 + number))
        counts[kind, status] += 1
        if kind in ("good", "slow"):
            assert status == 200, answer[:300]
            assert body is not None
            key = json.dumps({**body, "stream": None})
            actual = texts(answer, body["stream"])
            assert known.setdefault(key, actual) == actual  # equal requests get equal texts
        else:
            assert status in EXPECTED[kind], (kind, answer[:300])

    await asyncio.gather(*map(send_one, range(count)))
    lm = house.models.places["small"].model.lm  # type: ignore[attr-defined]
    for key, texts_told in known.items():
        body = json.loads(key)
        generations = lm.generate(
            [body["prompt"]] * body["n"], max_new_tokens=body["max_tokens"], temperature=1.0, seed=3
        )
        assert texts_told == [text.text for text in generations]
    return counts


def nothing_is_left(house: House) -> None:
    settles(lambda: not (house.used() or house.worker.count or house.server.open))
    settles(lambda: not house.listener.server_state.tasks)
    engine = house.models.places["small"].model.engine  # type: ignore[attr-defined]
    assert engine.is_idle
    assert not engine._cancelled
    assert house.worker.restarts == 0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short patience for a body shorter than its head says, and a low bound on the size of bodies."""
    monkeypatch.setattr("headway.serve.guard.PATIENCE", 2.0)
    monkeypatch.setattr("headway.serve.running.PATIENCE", 2.0)
    monkeypatch.setattr("headway.serve.guard.MOST_BYTES", 60_000)


def test_faults_of_some_harm_no_others() -> None:
    with serving(keys=[Key(KEY)], most=10_000) as house:
        counts = asyncio.run(storm(house, 200, 16, seed=1))
        assert sum(counts.values()) == 200
        assert {kind for kind, _ in counts} == {"good", *EXPECTED, "slow"}
        nothing_is_left(house)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_requests_leave_nothing_behind() -> None:
    """Neither pages nor tasks, Python objects or memory: what grows has grown in the first half."""
    with serving(keys=[Key(KEY)], most=10_000) as house:
        sizes, objects = [], []
        for seed in range(10):
            asyncio.run(storm(house, 1000, 32, seed))
            nothing_is_left(house)
            gc.collect()
            sizes.append(resident())
            objects.append(len(gc.get_objects()))
        assert max(objects[1:]) - objects[1] < 2000, objects
        assert sizes[9] - sizes[4] < 16e6, sizes
