"""A server of a small model on a port of its own, and helpers for tests of serving."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from pydantic import BaseModel

from headway.api import LanguageModel
from headway.patterns import Causal
from tests.generate.conftest import small
from tests.text.conftest import byte_level

pytest.importorskip("uvicorn", reason="headway[serve] is not installed")

from headway.serve.app import make_app
from headway.serve.markup import Part
from headway.serve.models import Models, Place
from headway.serve.running import Listener
from headway.serve.served import Decoding, Served
from headway.serve.server import Server
from headway.serve.tools import Prepared
from headway.serve.visits import Key
from headway.serve.worker import Worker


@dataclass
class House:
    """A running server with its parts."""

    url: str
    models: Models
    worker: Worker
    server: Server
    listener: Listener

    def used(self) -> int:
        """Returns the number of KV cache pages that sequences hold."""
        engines = [place.model.engine for place in self.models.loaded() if isinstance(place.model, Decoding)]
        pools = [engine.reader.cache.pool for engine in engines]
        return sum(pool.held - pool.idle for pool in pools)


def placed(*models: Served) -> list[Place]:
    """Returns places whose models are loaded."""
    return [Place(model.name, partial(copy, model), model, size=model.nbytes) for model in models]


def talker(*, context: int = 512) -> LanguageModel:
    """Returns a language model with random weights, a byte-level tokenizer and a chat template."""
    tokenizer = byte_level().with_chat_template("chatml")
    return LanguageModel(small(Causal(), context=context, vocab=max(330, tokenizer.vocab_size)), tokenizer)


def model_of(house: House, name: str = "small") -> LanguageModel:
    model = house.models.places[name].model
    assert isinstance(model, Decoding)
    return model.lm


def written(house: House, messages: Sequence[dict[str, str]], **options: Any) -> str:
    """Returns the answer of the Python API."""
    return str(model_of(house).chat(list(messages), **options).text)


class Animal(BaseModel):
    """A schema that answers must follow."""

    kind: Literal["cat", "dog"]
    legs: Literal[3, 4]


BODY = {"prompt": "x", "max_tokens": 1}


def answer(
    house: House, path: str = "/v1/completions", body: Any = BODY, method: str = "POST", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Sends a request, and returns the status, the headers and the body of its answer."""
    address = urlsplit(house.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    sent_headers = {"Content-Type": "application/json"}
    sent_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
    data = body if isinstance(body, bytes) else json.dumps(body)
    connection.request(method, path, data if method == "POST" else None, sent_headers)
    response = connection.getresponse()
    result = response.status, response.headers, response.read()
    connection.close()
    return result


def settles(holds: Callable[[], bool], seconds: float = 30) -> None:
    """Waits until `holds()`: a busy machine may stall for seconds, and gates in other threads wait longer than this."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def serving(
    *names: str, keep: int = 1 << 24, most: int = 256, strict: bool = False, **options: Any
) -> Iterator[House]:
    worker = Worker(most)
    models = [Decoding(name, talker(), worker, keep=keep) for name in names or ("small",)]
    with running(Models(placed(*models)), worker, strict=strict, **options) as house:
        yield house


@contextmanager
def running(models: Models, worker: Worker, *, strict: bool = False, **options: Any) -> Iterator[House]:
    """Yields a running server of these models. `options`: those of `make_app`, and `listener`: those of `Listener`."""
    settings, keys = options.pop("listener", {}), options.pop("keys", ())
    options["keys"] = [Key(key) if isinstance(key, str) else key for key in keys]
    server = Server(models, worker, strict=strict)
    listens = threading.Event()
    listener = Listener(
        server,
        make_app(server, **options),
        host="127.0.0.1",
        port=0,
        say=lambda url: listens.set(),
        **settings,
    )
    thread = threading.Thread(target=listener.run, daemon=True)
    thread.start()
    assert listens.wait(30)
    try:
        yield House(listener.url, models, worker, server, listener)
    finally:
        listener.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with serving() as running:
        yield running


@pytest.fixture
def client(house: House) -> Iterator[Any]:
    """OpenAI's own client."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as openai_client:
        yield openai_client


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model for every task, and one whose vectors may be cut."""
    from tests.serve.encoders import KINDS, encoder, words

    tokenizer = words(tmp_path_factory.mktemp("words"))
    models = {kind: encoder(kind, tokenizer) for kind in KINDS}
    models["nested"] = encoder("embedder", tokenizer, dimensions=(8, 16))
    return models


SCRIPT = [
    Part("reasoning", "Hm"),
    Part("reasoning", "."),
    Part("text", "Let me "),
    Part("text", "look."),
    Part("call", "find", 0),
    Part("arguments", '{"what": ', 0),
    Part("arguments", '"猫"}', 0),
    Part("call", "stop", 1),
]


class Scripted:
    """A reader that returns scripted parts whatever it reads: one for each push, and at the end all that are left."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)

    def push(self, text: str, *, last: bool) -> list[Part]:
        count = len(self.parts) if last else 1
        parts, self.parts = self.parts[:count], self.parts[count:]
        return parts


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every answer be read as SCRIPT."""
    monkeypatch.setattr(Prepared, "reader", lambda self: Scripted(SCRIPT))
