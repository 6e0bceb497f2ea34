"""Models that come and go: loaded when they are asked for, given up for others, with adapters of their own."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

from headway.api import LanguageModel
from headway.checkpoints.adapters import load_adapter, save_adapter
from headway.errors import CheckpointError, ConfigError
from headway.generate import GenerationConfig
from headway.nn import Adapter, Lora, attach, detach
from headway.nn.adapters import adapter_names
from headway.serve.errors import Unavailable
from headway.serve.models import Models, Place
from headway.serve.served import Decoding
from headway.serve.visits import Key
from headway.serve.worker import Worker
from tests.serve.conftest import House, placed, running, talker
from tests.serve.test_guard import ask
from tests.serve.test_operation import answer
from tests.serve.test_worker import LONG, settles

SIZE = Decoding("x", talker(), Worker(), keep=0).nbytes
SHORT = {"prompt": "go on", "max_tokens": 2}
ADMIN = [Key("boss", admin=True)]


class Source:
    """What models are loaded from: counts, waits and fails."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.loads, self.gate = worker, dict[str, int](), threading.Event()
        self.gate.set()

    def place(self, name: str, size: int = SIZE, fails: bool = False) -> Place:
        def load() -> Decoding:
            self.loads[name] = self.loads.get(name, 0) + 1
            assert self.gate.wait(20)
            if fails:
                raise CheckpointError(f"{name}: no config.json")
            return Decoding(name, talker(), self.worker, keep=0)

        return Place(name, load, size=size)


@contextmanager
def house_of(
    make: Callable[[Source], list[Any]], memory: int | None = None, ttl: float | None = None, **how: Any
) -> Iterator[tuple[House, Source]]:
    source = Source(Worker())
    with running(Models(make(source), memory=memory, ttl=ttl), source.worker, **how) as house:
        yield house, source


def listed(house: House) -> dict[str, str]:
    return {one["id"]: one["state"] for one in ask(house, "/v1/models", method="GET")[1]["data"]}


def test_a_model_is_loaded_when_it_is_asked_for_while_others_write() -> None:
    def make(source: Source) -> list[Any]:
        return [*placed(Decoding("here", talker(), source.worker, keep=1 << 20)), source.place("later")]

    with house_of(make) as (house, source):
        assert listed(house) == {"here": "loaded", "later": "unloaded"}
        source.gate.clear()
        found: list[Any] = []
        threads = [
            threading.Thread(target=lambda: found.append(ask(house, body={**LONG, "model": "later"})))
            for _ in "12"
        ]
        for thread in threads:
            thread.start()
        settles(lambda: bool(source.loads))
        expected = ask(house, body={**LONG, "model": "here"})  # the others wait for their model
        assert expected[0] == 200
        assert not found
        source.gate.set()
        for thread in threads:
            thread.join()
        assert [status for status, _ in found] == [200, 200]
        assert found[0][1]["choices"] == expected[1]["choices"]
        assert source.loads == {"later": 1}
        assert listed(house) == {"here": "loaded", "later": "loaded"}


def test_a_folder_that_fails_says_why_and_harms_no_other() -> None:
    with house_of(lambda s: [s.place("good"), s.place("bad", fails=True)]) as (house, _):
        for _ in "12":
            status, told = ask(house, body={**LONG, "model": "bad"})
            assert (status, told["error"]["type"]) == (503, "unavailable_error")
            assert "no config.json" in told["error"]["message"]
            assert ask(house, body={**LONG, "model": "good"})[0] == 200
        assert listed(house) == {"good": "loaded", "bad": "failed"}
        assert answer(house, "/ready", method="GET")[0] == 200


def test_models_share_a_budget_of_bytes() -> None:
    """The one that was used longest ago is given up; what is in use, and what was given as it is, stays."""
    memory = int(2.4 * SIZE * 8 / 7)
    with house_of(lambda s: [s.place("a"), s.place("b"), s.place("c")], memory) as (house, source):
        for name, loaded in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "bc"), ("b", "bc")):
            assert ask(house, body={**SHORT, "model": name})[0] == 200
            settles(lambda: not house.server.open)
            assert "".join(sorted(place.name for place in house.models.loaded())) == loaded
        assert source.loads == {"a": 1, "b": 2, "c": 1}
        budgets = [place.model.engine.reader.cache.pool.budget for place in house.models.loaded()]
        assert budgets == [(memory - 2 * SIZE) // 2] * 2


def test_what_is_in_use_is_not_given_up() -> None:
    with house_of(lambda s: [s.place("a"), s.place("b")], int(1.4 * SIZE * 8 / 7)) as (house, _):
        assert ask(house, body={**LONG, "model": "a"})[0] == 200
        settles(lambda: not house.server.open)
        with house.models.places["a"].asked():
            status, told = ask(house, body={**LONG, "model": "b"})
        assert (status, f"its weights take {SIZE} bytes" in told["error"]["message"]) == (503, True)
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
    begun = time.monotonic()
    models.load(base)
    assert base.used >= begun, "it is not given up before it was asked once"
    with tuned.asked():
        assert (base.live, tuned.live) == (1, 1)
    assert (base.live, tuned.live) == (0, 0)
    assert base.used >= begun
    source.worker.close()


def test_pages_are_bounded_by_what_weights_leave() -> None:
    """Three texts fit at once, and twelve are written all the same: as each alone."""
    prompts = [[i % 50 + 3] * 100 for i in range(12)]
    with house_of(lambda s: [s.place("a")]) as (house, _):
        assert ask(house, body=SHORT)[0] == 200
        model = house.models.places["a"].model
        assert isinstance(model, Decoding)
        engine = model.engine
        pool, made = engine.reader.cache.pool, model.lm.generate(prompts, max_new_tokens=60)
        model.keep(3 * pool.most(160, engine.step_tokens))
        status, told = ask(house, body={"prompt": prompts, "max_tokens": 60, "temperature": 0})
        assert status == 200
        assert [choice["text"] for choice in told["choices"]] == [text.text for text in made]
        assert pool.budget == 3 * pool.most(160, engine.step_tokens) >= pool.held
        too_long = {"prompt": [5] * 300, "max_tokens": 200}
        model.keep(1)
        settles(lambda: pool.budget == 1)
        status, told = ask(house, body=too_long)
        assert (status, "bytes" in told["error"]["message"]) == (400, True)


def test_texts_that_are_being_written_keep_their_room() -> None:
    with house_of(lambda s: [s.place("a")]) as (house, _):
        assert ask(house, body=SHORT)[0] == 200
        model = house.models.places["a"].model
        assert isinstance(model, Decoding)
        expected = ask(house, body=LONG)[1]["choices"]
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(ask(house, body=LONG)))
        thread.start()
        settles(lambda: bool(model.engine.running))
        model.keep(1)
        thread.join()
        assert found[0][1]["choices"] == expected


# -- adapters ------------------------------------------------------------------------------------------


def saved_adapter(lm: LanguageModel, folder: Path, seed: int) -> Adapter:
    fresh = Adapter.fresh(lm.model, Lora(rank=4, alpha=8), seed=seed)
    torch.manual_seed(seed)
    tensors = {n: t if "lora_A" in n else torch.randn_like(t) * 0.3 for n, t in fresh.tensors.items()}
    adapter = Adapter(fresh.layers, tensors)
    save_adapter(folder, adapter, lm.spec)
    return adapter


def text_of(house: House, model: str, **more: Any) -> str:
    status, told = ask(house, body={**LONG, "model": model, "max_tokens": 40, **more}, X_Api_Key="boss")
    assert status == 200, told
    text: str = told["choices"][0]["text"]
    return text


def expected(folders: list[Path]) -> list[str]:
    """What `generate` makes with each adapter alone, and without any."""
    made = []
    for folder in [None, *folders]:
        lm = talker()
        if folder is not None:
            attach(lm.model, load_adapter(folder, lm.spec), "own")
        made.append(lm.generate(LONG["prompt"], max_new_tokens=40, seed=1, temperature=1.0).text)
    return made


@pytest.mark.filterwarnings("ignore:.*bears no fingerprint")
def test_adapters_come_and_go_while_others_write(tmp_path: Path) -> None:
    lm = talker()
    folders = [tmp_path / "one.x", tmp_path / "two"]
    for seed, folder in enumerate(folders):
        saved_adapter(lm, folder, seed)
    plain, *adapted = expected(folders)
    assert len({plain, *adapted}) == 3
    memory = int(1.4 * SIZE * 8 / 7)  # weights are there once
    with house_of(lambda s: [s.place("small")], memory, keys=ADMIN) as (house, _):
        assert text_of(house, "small") == plain
        stop, wrong = threading.Event(), list[str]()

        def others() -> None:
            while not stop.is_set():
                if (text := text_of(house, "small", prompt=LONG["prompt"])) != plain:
                    wrong.append(text)

        thread = threading.Thread(target=others)
        thread.start()
        for name, folder, text in zip(("one.x", "two"), folders, adapted, strict=True):
            body = {"lora_name": name, "lora_path": str(folder)}
            for status in (200, 400):  # the name is taken then
                assert ask(house, "/v1/load_lora_adapter", body=body, X_Api_Key="boss")[0] == status
            assert text_of(house, name) == text
        assert [text_of(house, name) for name in ("one.x", "two", "small")] == [*adapted, plain]
        assert listed(house) == {"small": "loaded", "one.x": "loaded", "two": "loaded"}
        gone = ask(house, "/v1/unload_lora_adapter", body={"lora_name": "one.x"}, X_Api_Key="boss")
        assert gone[0] == 200
        assert ask(house, body={**LONG, "model": "one.x"}, X_Api_Key="boss")[0] == 404
        assert [text_of(house, name) for name in ("two", "small")] == [adapted[1], plain]
        stop.set()
        thread.join()
        assert not wrong
        model = house.models.places["small"].model
        assert isinstance(model, Decoding)
        settles(lambda: len(adapter_names(model.lm.model)) == 1)
        # another one of the same name is not taken for the one before
        body = {"lora_name": "one.x", "lora_path": str(folders[1])}
        assert ask(house, "/v1/load_lora_adapter", body=body, X_Api_Key="boss")[0] == 200
        assert text_of(house, "one.x") == adapted[1]


def test_what_is_no_adapter_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    with house_of(lambda s: [s.place("small")], keys=ADMIN) as (house, _):
        for body, status in (
            ({"lora_name": "x", "lora_path": str(tmp_path / "none")}, 503),
            ({"lora_name": "small", "lora_path": str(tmp_path)}, 400),
            ({"lora_name": "x", "lora_path": str(tmp_path), "model": "other"}, 404),
            ({"lora_name": "x", "lora_path": str(tmp_path), "load_inplace": True}, 400),
        ):
            assert ask(house, "/v1/load_lora_adapter", body=body, X_Api_Key="boss")[0] == status
        for name, status in (("small", 400), ("x", 404)):
            told = ask(house, "/v1/unload_lora_adapter", body={"lora_name": name}, X_Api_Key="boss")
            assert told[0] == status
        assert listed(house) == {"small": "loaded"}


def test_an_adapter_that_is_in_use_is_taken_off_when_its_text_has_ended(tmp_path: Path) -> None:
    saved_adapter(talker(), tmp_path / "a", 5)
    worker = Worker()
    model = Decoding("small", talker(), worker, keep=1 << 20)
    other = model.adapted("a", str(tmp_path / "a"))

    async def write() -> str:
        texts = other.texts([[5, 6, 7]], GenerationConfig(max_new_tokens=60))
        said, first = "", True
        async for told in other.write(texts):
            if first:
                other.drop()
                first = False
            said += "".join(delta.text for _, delta in told)
        return said

    said = asyncio.run(write())
    lm = talker()
    attach(lm.model, load_adapter(tmp_path / "a", lm.spec), "own")
    assert said == lm.generate([5, 6, 7], max_new_tokens=60).text
    settles(lambda: not adapter_names(model.lm.model))
    worker.close()


def test_detach_leaves_the_model_as_it_was() -> None:
    lm = talker()
    before = lm.generate("a text", max_new_tokens=20).text
    fresh = Adapter.fresh(lm.model, Lora(rank=2, alpha=4))
    attach(lm.model, Adapter(fresh.layers, {n: t + 0.3 for n, t in fresh.tensors.items()}), "one")
    attach(lm.model, fresh, "two")
    assert lm.generate("a text", max_new_tokens=20).text != before
    with pytest.raises(ConfigError, match="no adapter 'three'"):
        detach(lm.model, "three")
    detach(lm.model, "one")
    assert adapter_names(lm.model) == ["two"]
    assert lm.generate("a text", max_new_tokens=20).text == before
    assert json.dumps(adapter_names(lm.model)) == '["two"]'


def test_unavailable_says_what_failed() -> None:
    models = Models([Place("x", lambda: 1 / 0)])  # type: ignore[arg-type,return-value]
    with pytest.raises(Unavailable, match="x cannot be loaded: division by zero"):
        models.load(models.places["x"])


def test_the_thread_that_loads_ends_with_it() -> None:
    """Its OpenMP threads would keep those of the engines from spinning."""
    model, threads = Decoding("x", talker(), Worker(), keep=0), list[threading.Thread]()

    def load() -> Decoding:
        threads.append(threading.current_thread())
        return model

    place = Place("x", load)
    Models([place]).load(place)
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()
