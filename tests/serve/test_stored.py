"""The KV cache that a server stored is found by its next run if the model is the same."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from headway.api import load
from headway.cache import PAGE, put_kept, take_kept
from headway.checkpoints.adapters import load_adapter, save_adapter
from headway.errors import CacheError
from headway.generate import Engine, Reader
from headway.nn import Adapter, Lora, attach
from headway.serve.calls import served_as
from headway.serve.models import Models
from headway.serve.served import Decoding
from headway.serve.stored import FILE, load_stored, save_stored, version
from headway.serve.worker import Worker
from tests.generate.engines import MODELS, drain, drawn, ids_of
from tests.serve.conftest import placed, running, talker
from tests.serve.test_guard import ask


def engine_of(kind: str, **options: Any) -> Engine:
    return Engine(Reader(MODELS[kind], keep=1 << 24, **options))


@pytest.mark.parametrize(
    ("kind", "how"),
    [("full", {}), ("windows", {}), ("mixed", {}), ("linear", {}), ("full", {"kv_dtype": torch.int8})],
    ids=["full", "windows", "mixed", "linear", "int8"],
)
def test_what_was_kept_is_found_elsewhere(kind: str, how: dict[str, Any]) -> None:
    draw = Random(3)
    common = [draw.randrange(330) for _ in range(300)]
    first, second = engine_of(kind, **how), engine_of(kind, **how)
    for number in range(3):
        first.add(drawn(draw, number, common, 200, 60, False))
    drain(first)
    kept = take_kept(first.reader.cache)
    assert sum(map(len, kept.keys)) > 0
    put_kept(second.reader.cache, kept)
    for number in range(3, 6):
        in_first, in_second = (drawn(Random(number), number, common, 200, 60, False) for _ in "ab")
        first.add(in_first)
        drain(first)
        second.add(in_second)
        drain(second)
        assert ids_of(in_first) == ids_of(in_second)
        assert in_first.stored == in_second.stored
    with pytest.raises(CacheError, match="must be empty"):
        put_kept(second.reader.cache, kept)
    with pytest.raises(CacheError, match="do not fit this model's layers"):
        put_kept(engine_of("linear" if kind == "full" else "full").reader.cache, kept)


def decoder(folder: Path, worker: Worker, **options: Any) -> Decoding:
    model = served_as("small", load(str(folder)), worker, keep=1 << 24, **{"exact": False, **options})
    assert isinstance(model, Decoding)
    model.source = folder
    return model


def test_a_server_begins_with_what_the_last_one_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talker().save(tmp_path / "small")
    body = {"prompt": [7] * 150 + [9], "max_tokens": 5, "temperature": 0}
    answers = []
    for run in range(2):
        worker = Worker()
        model = decoder(tmp_path / "small", worker)
        assert load_stored(model, tmp_path / "kept") == run * 2
        with running(Models(placed(model)), worker) as house:
            answers.append(ask(house, "/v1/completions", body)[1])
        if not run:
            assert save_stored(model, tmp_path / "kept") == 2
    assert answers[0]["choices"] == answers[1]["choices"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, 2 * PAGE]
    (path,) = (tmp_path / "kept").glob(f"*/{FILE}")
    assert path.parent.name == version(model)
    assert path.stat().st_mode & 0o777 == 0o600
    assert version(decoder(tmp_path / "small", worker, exact=True)) != version(model)
    fresh = Adapter.fresh(model.lm.model, Lora(rank=2, alpha=4))
    save_adapter(tmp_path / "adapter", fresh, model.lm.spec)
    before = version(model)
    attach(model.lm.model, load_adapter(tmp_path / "adapter", model.lm.spec), "tuned", dtype=torch.float32)
    assert version(model) == before, "texts without the adapter are what they were"
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-9])
    assert load_stored(decoder(tmp_path / "small", Worker()), tmp_path / "kept") == 0
    assert "cannot be used" in caplog.text
    header = int.from_bytes(content[:8], "little")
    names = json.loads(content[8 : 8 + header])
    assert {*names} == {"__metadata__", *(f"{layer}.{i}" for layer in range(2) for i in range(2))}
