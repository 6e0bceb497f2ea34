"""The worker thread of a server: whose turn it is, what fails alone, and what continues when the thread ends."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import BackendError
from headway.generate import Engine, GenerationConfig, Reader
from headway.generate.requests import make_requests
from headway.generate.sequences import SampledText
from headway.serve.served import Decoding
from headway.serve.worker import FairTurns
from tests.serve.conftest import House, answer, serving, settles, talker
from tests.serve.test_guard import ask

LONG = {"prompt": "go on", "max_tokens": 300, "seed": 1, "logit_bias": {}}


class Named:
    """A client of `FairTurns` whose turns have a fixed cost."""

    def __init__(self, cost: float) -> None:
        self.cost, self.had = cost, 0.0


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(1, 300))
def test_all_have_the_same_time_however_long_a_turn_is(costs: list[float], count: int) -> None:
    turns, clients = FairTurns[Named](), [Named(cost) for cost in costs]
    for _ in range(count):
        client = turns.next(clients)
        client.had += client.cost
        turns.took(client, client.cost)
        for ahead in clients:
            for behind in clients:
                assert ahead.had - behind.had <= ahead.cost + 1e-6


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=6), st.integers(1, 200))
def test_who_comes_late_is_not_owed_the_time_before(costs: list[float], count: int) -> None:
    turns, (late, *early) = FairTurns[Named](), [Named(cost) for cost in costs]
    for _ in range(count):
        turns.took(client := turns.next(early), client.cost)
    since = dict.fromkeys(early, 0.0)
    for _ in range(50):
        client = turns.next([late, *early])
        turns.took(client, client.cost)
        if client is late:
            late.had += late.cost
        else:
            since[client] += client.cost
        assert late.had <= max(since.values()) + late.cost + max(costs)


def engine_of(house: House, name: str = "small") -> Any:
    model = house.models.places[name].model
    assert isinstance(model, Decoding)
    return model.engine


@contextmanager
def failing(engine: Any, error: BaseException, after: int = 0) -> Iterator[list[int]]:
    """Makes a model's steps fail, after so many of them; yields the count of steps."""
    original, steps = engine.reader.read, [0]

    def read(*args: Any, **kwargs: Any) -> Any:
        steps[0] += 1
        if steps[0] > after:
            raise error
        return original(*args, **kwargs)

    engine.reader.read = read
    try:
        yield steps
    finally:
        engine.reader.read = original


class Killed(BaseException):
    """An exception that no step handles."""


def test_the_thread_comes_back_when_it_is_killed() -> None:
    with serving() as house:
        before = ask(house, body=LONG)
        with failing(engine_of(house), Killed(), after=3):
            status, response = ask(house, body=LONG)
            assert (status, response["error"]["type"]) == (503, "unavailable_error")
            assert "retry" in response["error"]["message"]
        start = time.monotonic()
        assert ask(house, body=LONG)[1]["choices"] == before[1]["choices"]
        assert time.monotonic() - start < 5
        assert house.worker.restarts == 1
        settles(lambda: not house.used() and not house.worker.count)


def test_it_comes_back_when_it_is_killed_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as house:
        original, killed = house.worker._tell, threading.Event()

        def tell(*tickets: Any) -> None:
            if not killed.is_set():
                killed.set()
                raise Killed
            original(*tickets)

        monkeypatch.setattr(house.worker, "_tell", tell)
        assert ask(house, body=LONG)[0] == 503
        assert ask(house, body=LONG)[0] == 200
        settles(lambda: not house.used() and not house.worker.count)


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_fails_harms_no_other(stream: bool) -> None:
    with serving("good", "bad") as house:
        expected = ask(house, body={**LONG, "model": "good"})[1]["choices"]
        with failing(engine_of(house, "bad"), BackendError("broken"), after=2):
            responses: list[Any] = []
            body = {**LONG, "model": "good"}
            other = threading.Thread(target=lambda: responses.append(ask(house, body=body)))
            other.start()
            for _ in range(3):
                said = answer(house, body={**LONG, "model": "bad", "stream": stream})[2].decode()
                assert "broken" in said or "internal server error" in said
            other.join()
        assert responses[0][1]["choices"] == expected
        settles(lambda: not house.used())


def test_a_step_that_fails_for_none_does_not_spin() -> None:
    """An error before any text is read fails the requests of the engine, and the thread waits."""
    with serving() as house:
        engine, original = engine_of(house), engine_of(house).reader.open
        calls = [0]

        def opens(*args: Any) -> Any:
            calls[0] += 1
            raise BackendError("no pages")

        engine.reader.open = opens
        assert ask(house, body=LONG)[0] == 500
        time.sleep(0.05)
        assert calls[0] < 4
        engine.reader.open = original
        assert ask(house, body=LONG)[0] == 200


def test_prompts_that_wait_are_bounded() -> None:
    with serving() as house:
        house.worker.most_waiting = 100
        engine = engine_of(house)
        gate, original = threading.Event(), engine.reader.read

        def read(*args: Any, **kwargs: Any) -> Any:
            gate.wait(60)
            return original(*args, **kwargs)

        engine.reader.read = read
        thread = threading.Thread(target=ask, args=(house,), kwargs={"body": {**LONG, "prompt": [5] * 90}})
        thread.start()
        settles(lambda: house.worker.count == 1)
        status, response = ask(house, body={**LONG, "prompt": [5] * 20})
        assert (status, response["error"]["type"]) == (429, "rate_limit_error")
        assert "90 prompt tokens are waiting, and 20 more" in response["error"]["message"]
        gate.set()
        thread.join()
        assert ask(house, body={**LONG, "prompt": [5] * 200})[0] == 200  # alone: no other prompt waits


def test_texts_of_another_salt_share_nothing() -> None:
    lm = talker()
    engine, prompt = Engine(Reader(lm.model, keep=1 << 24)), [7] * 200
    for salt, stored in (("a", 0), ("a", 192), ("b", 0), ("", 0), ("b", 192)):
        config = GenerationConfig(max_new_tokens=2, prefix_cache=True, cache_salt=salt)
        text = SampledText(make_requests([prompt], config, lm.spec)[0], lm.tokenizer)
        for _ in engine.run([text]):
            pass
        assert text.stored == stored
