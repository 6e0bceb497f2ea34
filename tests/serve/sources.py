"""Models that are loaded on request, and adapters for them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headway.api import LanguageModel
from headway.checkpoints.adapters import save_adapter
from headway.errors import CheckpointError
from headway.nn import Adapter, Lora
from headway.serve.models import Models, Place
from headway.serve.served import Decoding
from headway.serve.worker import Worker
from tests.serve.conftest import House, running, talker
from tests.serve.test_guard import ask

SIZE = Decoding("x", talker(), Worker(), keep=0).nbytes


class Source:
    """A source of models that counts its loads, waits for `gate` and fails if told to."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.loads, self.gate = worker, dict[str, int](), threading.Event()
        self.gate.set()

    def place(self, name: str, size: int = SIZE, fails: bool = False) -> Place:
        def load() -> Decoding:
            self.loads[name] = self.loads.get(name, 0) + 1
            assert self.gate.wait(60)
            if fails:
                raise CheckpointError(f"{name}: no config.json")
            return Decoding(name, talker(), self.worker, keep=0)

        return Place(name, load, size=size)


@contextmanager
def house_of(
    make: Callable[[Source], list[Any]], memory: int | None = None, ttl: float | None = None, **options: Any
) -> Iterator[tuple[House, Source]]:
    source = Source(Worker())
    with running(Models(make(source), memory=memory, ttl=ttl), source.worker, **options) as house:
        yield house, source


def listed(house: House) -> dict[str, str]:
    return {entry["id"]: entry["state"] for entry in ask(house, "/v1/models", method="GET")[1]["data"]}


def saved_adapter(lm: LanguageModel, folder: Path, seed: int) -> Adapter:
    fresh = Adapter.fresh(lm.model, Lora(rank=4, alpha=8), seed=seed)
    torch.manual_seed(seed)
    tensors = {n: t if "lora_A" in n else torch.randn_like(t) * 0.3 for n, t in fresh.tensors.items()}
    adapter = Adapter(fresh.layers, tensors)
    save_adapter(folder, adapter, lm.spec)
    return adapter
