"""Texts that wait for an encoder: how many may wait, which are read in a step, and what becomes of them."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from random import Random
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from headway.serve.calls import Packed, Packing
from headway.text import Encoded
from tests.serve.conftest import House, settles
from tests.serve.encoders import answered, serving_encoders
from tests.serve.test_guard import ask


@pytest.fixture(scope="module")
def house(encoders: dict[str, Any]) -> Iterator[House]:
    with serving_encoders(encoders) as running:
        yield running


def waiting(packing: Packing) -> int:
    """Returns the number of texts that are still to be read."""
    return sum(not text.ended for text in packing.waiting)


@pytest.mark.parametrize("most", [0, 2])
def test_no_more_than_may_wait_are_taken(encoders: dict[str, Any], most: int) -> None:
    with serving_encoders({"embedder": encoders["embedder"]}, most=most, decoders=()) as house:
        packing: Any = house.models.places["embedder"].model.engine  # type: ignore[attr-defined]
        read, goes_on = packing._read, threading.Event()
        packing._read = lambda texts: goes_on.wait(60) and read(texts)
        body = {"model": "embedder", "input": "a dog"}
        responses: list[Any] = []
        threads = [
            threading.Thread(target=lambda: responses.append(ask(house, "/v1/embeddings", body)))
            for _ in range(most)
        ]
        [thread.start() for thread in threads]
        settles(lambda: house.worker.count == most)
        status, response = ask(house, "/v1/embeddings", body)
        assert (status, response["error"]["type"]) == (429, "rate_limit_error")
        goes_on.set()
        [thread.join() for thread in threads]
        assert [status for status, _ in responses] == [200] * most


def test_a_decoder_writes_while_many_texts_are_read(house: House) -> None:
    packing: Any = house.models.places["embedder"].model.engine  # type: ignore[attr-defined]
    read, begun = packing._read, threading.Event()

    def slow(texts: Any) -> Any:
        begun.set()
        time.sleep(0.02)
        return read(texts)

    packing._read = slow
    try:
        body = {"model": "embedder", "input": ["the cat " * 20] * 300}
        thread = threading.Thread(target=ask, args=(house, "/v1/embeddings", body))
        thread.start()
        assert begun.wait(30)
        answered(house, "/v1/completions", model="talker", prompt="a", max_tokens=8)
        assert waiting(packing) > 0
        thread.join()
    finally:
        packing._read = read


def test_a_client_that_leaves_takes_its_texts_along(house: House) -> None:
    packing: Any = house.models.places["embedder"].model.engine  # type: ignore[attr-defined]
    read, begun, goes_on = packing._read, threading.Event(), threading.Event()

    def slow(texts: Any) -> Any:
        begun.set()
        assert goes_on.wait(60)
        return read(texts)

    packing._read = slow
    try:
        body = json.dumps({"model": "embedder", "input": ["the cat " * 20] * 500}).encode()
        address = urlsplit(house.url)
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert begun.wait(30)
            assert waiting(packing) > 400
        settles(lambda: waiting(packing) == 0)
    finally:
        packing._read = read
        goes_on.set()
    settles(lambda: house.worker.count == 0)


@pytest.mark.parametrize("seed", range(20))
def test_a_step_reads_as_much_as_its_budget_holds(seed: int) -> None:
    draw = Random(seed)
    lengths = [draw.randint(1, 60) for _ in range(draw.randint(1, 40))]
    steps: list[list[int]] = []

    def read(texts: Any) -> list[torch.Tensor]:
        steps.append([len(text.ids) for text in texts])
        return [torch.zeros(1)] * len(texts)

    packing = Packing(read, 50)
    for i, n in enumerate(lengths):
        packing.add(Packed(Encoded.of([0] * n), sum(lengths[:i])))
    while waiting(packing):
        packing.step()
    assert [n for step in steps for n in step] == lengths
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        assert sum(step) <= 50 or len(step) == 1
        assert after is None or sum(step) + after[0] > 50


def test_a_short_request_does_not_wait_for_a_long_one() -> None:
    steps: list[list[int]] = []

    def read(texts: Any) -> list[torch.Tensor]:
        steps.append([text.ids[0] for text in texts])
        return [torch.zeros(1)] * len(texts)

    packing = Packing(read, 100)
    for i in range(50):
        packing.add(Packed(Encoded.of([1] * 50), i * 50))
    packing.step()
    for i in range(3):
        packing.add(Packed(Encoded.of([2] * 50), i * 50))
    while waiting(packing):
        packing.step()
    assert sum(2 in step for step in steps[:5]) >= 2
    assert sum(step.count(2) for step in steps[:6]) == 3
    assert sum(step.count(1) for step in steps) == 50


def test_what_cannot_be_read_fails_its_own_texts_alone() -> None:
    calls: list[int] = []

    def read(batch: Any) -> list[torch.Tensor]:
        calls.append(len(batch))
        if len(calls) == 1:
            raise RuntimeError("broken")
        return [torch.tensor([float("nan") if packed_text.ids[0] == 7 else 1.0]) for packed_text in batch]

    packing = Packing(read, 4)
    texts = [Packed(Encoded.of([token] * 2), i) for i, token in enumerate([1, 1, 7, 1])]
    for text in texts:
        packing.add(text)
    packing.step()
    assert [text.ended for text in texts] == [True, True, False, False]
    packing.step()
    assert [type(text.error) for text in texts] == [
        RuntimeError,
        RuntimeError,
        FloatingPointError,
        type(None),
    ]
    assert [len(text.deltas) for text in texts] == [0, 0, 0, 1]
