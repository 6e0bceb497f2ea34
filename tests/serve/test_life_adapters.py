"""Adapters that are loaded and unloaded while other requests are answered."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoints.adapters import load_adapter
from headway.errors import ConfigError
from headway.generate import GenerationConfig
from headway.nn import Adapter, Lora, attach, detach
from headway.nn.adapters import adapter_names
from headway.serve.served import Decoding
from headway.serve.visits import Key
from headway.serve.worker import Worker
from tests.serve.conftest import House, settles, talker
from tests.serve.sources import SIZE, house_of, listed, saved_adapter
from tests.serve.test_guard import ask
from tests.serve.test_worker import LONG

ADMIN = [Key("boss", admin=True)]


def text_of(house: House, model: str, **fields: Any) -> str:
    status, response = ask(house, body={**LONG, "model": model, "max_tokens": 40, **fields}, X_Api_Key="boss")
    assert status == 200, response
    text: str = response["choices"][0]["text"]
    return text


def expected(folders: list[Path]) -> list[str]:
    """Returns what `generate` makes without an adapter, and with each adapter alone."""
    texts = []
    for folder in [None, *folders]:
        lm = talker()
        if folder is not None:
            attach(lm.model, load_adapter(folder, lm.spec), "own")
        texts.append(lm.generate(LONG["prompt"], max_new_tokens=40, seed=1, temperature=1.0).text)
    return texts


@pytest.mark.filterwarnings("ignore:.*stores no fingerprint")
def test_adapters_come_and_go_while_others_write(tmp_path: Path) -> None:
    lm = talker()
    folders = [tmp_path / "one.x", tmp_path / "two"]
    for seed, folder in enumerate(folders):
        saved_adapter(lm, folder, seed)
    plain, *adapted = expected(folders)
    assert len({plain, *adapted}) == 3
    memory = int(1.4 * SIZE * 8 / 7)  # room for the weights once
    with house_of(lambda s: [s.place("small")], memory, keys=ADMIN) as (house, _):
        assert text_of(house, "small") == plain
        stop, wrong_texts = threading.Event(), list[str]()

        def others() -> None:
            while not stop.is_set():
                if (text := text_of(house, "small", prompt=LONG["prompt"])) != plain:
                    wrong_texts.append(text)

        thread = threading.Thread(target=others)
        thread.start()
        for name, folder, text in zip(("one.x", "two"), folders, adapted, strict=True):
            body = {"lora_name": name, "lora_path": str(folder)}
            for status in (200, 400):  # the second time, the name is taken
                assert ask(house, "/v1/load_lora_adapter", body=body, X_Api_Key="boss")[0] == status
            assert text_of(house, name) == text
        assert [text_of(house, name) for name in ("one.x", "two", "small")] == [*adapted, plain]
        assert listed(house) == {"small": "loaded", "one.x": "loaded", "two": "loaded"}
        response = ask(house, "/v1/unload_lora_adapter", body={"lora_name": "one.x"}, X_Api_Key="boss")
        assert response[0] == 200
        assert ask(house, body={**LONG, "model": "one.x"}, X_Api_Key="boss")[0] == 404
        assert [text_of(house, name) for name in ("two", "small")] == [adapted[1], plain]
        stop.set()
        thread.join()
        assert not wrong_texts
        model = house.models.places["small"].model
        assert isinstance(model, Decoding)
        settles(lambda: len(adapter_names(model.lm.model)) == 1)
        # an adapter loaded later under the same name is not taken for the one before
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
            response = ask(house, "/v1/unload_lora_adapter", body={"lora_name": name}, X_Api_Key="boss")
            assert response[0] == status
        assert listed(house) == {"small": "loaded"}


def test_an_adapter_that_is_in_use_is_taken_off_when_its_text_has_ended(tmp_path: Path) -> None:
    saved_adapter(talker(), tmp_path / "a", 5)
    worker = Worker()
    model = Decoding("small", talker(), worker, keep=1 << 20)
    adapted = model.adapted("a", str(tmp_path / "a"))

    async def write() -> str:
        texts = adapted.texts([[5, 6, 7]], GenerationConfig(max_new_tokens=60))
        text, first = "", True
        async for deltas in adapted.write(texts):
            if first:
                adapted.drop()
                first = False
            text += "".join(delta.text for _, delta in deltas)
        return text

    text = asyncio.run(write())
    lm = talker()
    attach(lm.model, load_adapter(tmp_path / "a", lm.spec), "own")
    assert text == lm.generate([5, 6, 7], max_new_tokens=60).text
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
