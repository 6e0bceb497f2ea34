"""Models that are loaded on request and unloaded for others."""

import threading
import time
from typing import Any
from weakref import ref

import pytest

from headway.serve.errors import Unavailable
from headway.serve.models import Models, Place
from headway.serve.served import Decoding
from headway.serve.worker import Worker
from tests.serve.conftest import placed, settles, talker
from tests.serve.operation import answer
from tests.serve.sources import SIZE, Source, house_of, listed
from tests.serve.test_guard import ask
from tests.serve.test_worker import LONG

SHORT = {"prompt": "go on", "max_tokens": 2}


def test_a_model_is_loaded_when_it_is_asked_for_while_others_write() -> None:
    def make(source: Source) -> list[Any]:
        return [*placed(Decoding("here", talker(), source.worker, keep=1 << 20)), source.place("later")]

    with house_of(make) as (house, source):
        assert listed(house) == {"here": "loaded", "later": "unloaded"}
        source.gate.clear()
        responses: list[Any] = []
        threads = [
            threading.Thread(target=lambda: responses.append(ask(house, body={**LONG, "model": "later"})))
            for _ in "12"
        ]
        for thread in threads:
            thread.start()
        settles(lambda: bool(source.loads))
        expected = ask(house, body={**LONG, "model": "here"})  # the others wait for their model
        assert expected[0] == 200
        assert not responses
        source.gate.set()
        for thread in threads:
            thread.join()
        assert [status for status, _ in responses] == [200, 200]
        assert responses[0][1]["choices"] == expected[1]["choices"]
        assert source.loads == {"later": 1}
        assert listed(house) == {"here": "loaded", "later": "loaded"}


def test_a_folder_that_fails_says_why_and_harms_no_other() -> None:
    with house_of(lambda s: [s.place("good"), s.place("bad", fails=True)]) as (house, _):
        for _ in "12":
            status, response = ask(house, body={**LONG, "model": "bad"})
            assert (status, response["error"]["type"]) == (503, "unavailable_error")
            assert "no config.json" in response["error"]["message"]
            assert ask(house, body={**LONG, "model": "good"})[0] == 200
        assert listed(house) == {"good": "loaded", "bad": "failed"}
        assert answer(house, "/ready", method="GET")[0] == 200


def test_models_share_a_budget_of_bytes() -> None:
    """The least recently used model is unloaded, and the KV caches share what the weights leave."""
    memory = int(2.4 * SIZE * 8 / 7)
    with house_of(lambda s: [s.place("a"), s.place("b"), s.place("c")], memory) as (house, source):
        for name, loaded in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "bc"), ("b", "bc")):
            assert ask(house, body={**SHORT, "model": name})[0] == 200
            settles(lambda: not house.server.open)
            assert "".join(sorted(place.name for place in house.models.loaded())) == loaded
        assert source.loads == {"a": 1, "b": 2, "c": 1}
        budgets = [place.model.engine.reader.cache.pool.budget for place in house.models.loaded()]
        assert budgets == [(memory - 2 * SIZE) // 2] * 2


def test_models_that_are_loaded_from_the_start_share_the_budget() -> None:
    memory = int(2.4 * SIZE * 8 / 7)

    def make(source: Source) -> list[Place]:
        return [
            *placed(*(Decoding(name, talker(), source.worker, keep=0) for name in "ab")),
            source.place("c"),
        ]

    def budgets() -> list[int]:
        return [place.model.engine.reader.cache.pool.budget for place in house.models.loaded()]

    with house_of(make, memory) as (house, source):
        settles(lambda: budgets() == [(memory - 2 * SIZE) // 2] * 2)
        assert ask(house, body={**SHORT, "model": "b"})[0] == 200
        settles(lambda: not house.server.open)
        assert ask(house, body={**SHORT, "model": "c"})[0] == 200
        assert [place.name for place in house.models.loaded()] == ["b", "c"]
        settles(lambda: budgets() == [(memory - 2 * SIZE) // 2] * 2)
        assert source.loads == {"c": 1}


def test_what_is_in_use_is_not_given_up() -> None:
    with house_of(lambda s: [s.place("a"), s.place("b")], int(1.4 * SIZE * 8 / 7)) as (house, _):
        assert ask(house, body={**LONG, "model": "a"})[0] == 200
        settles(lambda: not house.server.open)
        with house.models.places["a"].asked():
            status, response = ask(house, body={**LONG, "model": "b"})
        assert (status, f"its weights take {SIZE} bytes" in response["error"]["message"]) == (503, True)
        assert ask(house, body={**LONG, "model": "b"})[0] == 200
        assert [place.name for place in house.models.loaded()] == ["b"]


def test_a_model_larger_than_its_files_said_is_no_more_than_the_budget() -> None:
    with house_of(lambda s: [s.place("a", size=10)], SIZE // 2) as (house, source):
        assert ask(house, body={**LONG, "model": "a"})[0] == 503
        assert source.loads == {"a": 1}
        assert not house.models.loaded()


def test_a_model_that_nobody_uses_goes() -> None:
    with house_of(lambda s: [s.place("a")], ttl=0.2) as (house, source):
        assert ask(house, body=LONG)[0] == 200
        weights = ref(house.models.places["a"].model.lm.model)  # type: ignore[attr-defined]
        with house.models.places["a"].asked():
            time.sleep(0.5)
            assert listed(house) == {"a": "loaded"}
        settles(lambda: listed(house) == {"a": "unloaded"})
        settles(lambda: weights() is None)
        assert ask(house, body=LONG)[0] == 200
        assert source.loads == {"a": 2}


def test_time_counts_from_when_a_model_was_loaded_or_its_adapter_used() -> None:
    source = Source(Worker())
    base = source.place("a")
    models = Models([base], ttl=30)
    tuned = Place("tuned", base.load, base=base)
    start = time.monotonic()
    models.load(base)
    assert base.used >= start, "it is not given up before it was asked once"
    with tuned.asked():
        assert (base.live, tuned.live) == (1, 1)
    assert (base.live, tuned.live) == (0, 0)
    assert base.used >= start
    source.worker.close()


def test_pages_are_bounded_by_what_weights_leave() -> None:
    """Three sequences fit at once, yet twelve are generated, each as if it were alone."""
    prompts = [[i % 50 + 3] * 100 for i in range(12)]
    with house_of(lambda s: [s.place("a")]) as (house, _):
        assert ask(house, body=SHORT)[0] == 200
        model = house.models.places["a"].model
        assert isinstance(model, Decoding)
        engine = model.engine
        pool, generations = engine.reader.cache.pool, model.lm.generate(prompts, max_new_tokens=60)
        model.keep(3 * pool.most(160, engine.step_tokens))
        status, response = ask(house, body={"prompt": prompts, "max_tokens": 60, "temperature": 0})
        assert status == 200
        assert [choice["text"] for choice in response["choices"]] == [text.text for text in generations]
        assert pool.budget == 3 * pool.most(160, engine.step_tokens) >= pool.held
        too_long = {"prompt": [5] * 300, "max_tokens": 200}
        model.keep(1)
        settles(lambda: pool.budget == 1)
        status, response = ask(house, body=too_long)
        assert (status, "bytes" in response["error"]["message"]) == (400, True)


def test_texts_that_are_being_written_keep_their_room() -> None:
    with house_of(lambda s: [s.place("a")]) as (house, _):
        assert ask(house, body=SHORT)[0] == 200
        model = house.models.places["a"].model
        assert isinstance(model, Decoding)
        expected = ask(house, body=LONG)[1]["choices"]
        responses: list[Any] = []
        thread = threading.Thread(target=lambda: responses.append(ask(house, body=LONG)))
        thread.start()
        settles(lambda: bool(model.engine.running))
        model.keep(1)
        thread.join()
        assert responses[0][1]["choices"] == expected


def test_unavailable_says_what_failed() -> None:
    models = Models([Place("x", lambda: 1 / 0)])  # type: ignore[arg-type,return-value]
    with pytest.raises(Unavailable, match="x cannot be loaded: division by zero"):
        models.load(models.places["x"])


def test_the_thread_that_loads_ends_with_it() -> None:
    """Its OpenMP threads would keep the threads of the engines from spinning."""
    model, threads = Decoding("x", talker(), Worker(), keep=0), list[threading.Thread]()

    def load() -> Decoding:
        threads.append(threading.current_thread())
        return model

    place = Place("x", load)
    Models([place]).load(place)
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()
