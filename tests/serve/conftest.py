"""A server of a small model, on a port of its own."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from headway.api import LanguageModel
from headway.patterns import Causal
from tests.generate.conftest import small
from tests.text.conftest import byte_level

uvicorn = pytest.importorskip("uvicorn", reason="headway[serve] is not installed")

from headway.serve.app import make_app  # noqa: E402
from headway.serve.models import Models  # noqa: E402
from headway.serve.served import Decoding  # noqa: E402
from headway.serve.server import Server  # noqa: E402
from headway.serve.worker import Worker  # noqa: E402


@dataclass
class House:
    """A server that runs."""

    url: str
    models: Models
    worker: Worker
    server: "uvicorn.Server"

    def used(self) -> int:
        """Pages that texts hold."""
        engines = [model.engine for model in self.models if isinstance(model, Decoding)]
        pools = [engine.reader.cache.pool for engine in engines]
        return sum(pool.held - pool.idle for pool in pools)


def talker() -> LanguageModel:
    """Random weights, bytes, and a chat template."""
    tokenizer = byte_level().with_chat_template("chatml")
    return LanguageModel(small(Causal(), context=512, vocab=max(330, tokenizer.vocab_size)), tokenizer)


@contextmanager
def serving(
    *names: str, keep: int = 1 << 24, most: int = 256, strict: bool = False, **how: Any
) -> Iterator[House]:
    worker = Worker(most)
    models = [Decoding(name, talker(), worker, keep=keep) for name in names or ("small",)]
    with running(Models(models), worker, strict=strict, **how) as house:
        yield house


@contextmanager
def running(models: Models, worker: Worker, *, strict: bool = False, **how: Any) -> Iterator[House]:
    """A server of these models."""
    app = make_app(Server(models, worker, strict=strict), **how)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield House(f"http://127.0.0.1:{port}", models, worker, server)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with serving() as running:
        yield running
