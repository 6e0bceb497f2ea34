"""What the bench asks of llama.cpp, by bindings that record their calls."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway_lab.bench import decoders, llama_cpp
from headway_lab.bench.inputs import UnsupportedCase

ROOM = 8


class Bindings:
    """Bindings like llama-cpp-python's that record every call with its numbers; logits are 0, 1, 2, .."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.logits = (ctypes.c_float * 64)(*range(64))
        self.batch = SimpleNamespace(
            n_tokens=0, token=[0] * ROOM, pos=[0] * ROOM, n_seq_id=[0] * ROOM, logits=[0] * ROOM
        )
        self.batch.seq_id = [[0] for _ in range(ROOM)]
        self.given: dict[str, Any] = {
            "llama_model_default_params": SimpleNamespace(n_gpu_layers=99),
            "llama_context_default_params": SimpleNamespace(),
            "llama_model_load_from_file": "model",
            "llama_model_get_vocab": "vocab",
            "llama_vocab_n_tokens": 5,
            "llama_init_from_model": "context",
            "llama_get_memory": "memory",
            "llama_batch_init": self.batch,
            "llama_decode": 0,
            "llama_get_logits": ctypes.cast(self.logits, ctypes.POINTER(ctypes.c_float)),
            "llama_print_system_info": b" AVX512 = 1 \n",
        }

    def __getattr__(self, name: str) -> Any:
        def call(*values: Any) -> Any:
            self.calls.append(f"{name.removeprefix('llama_')} {' '.join(map(self.text, values))}".strip())
            return self.given.get(name)

        return call

    def text(self, value: Any) -> str:
        if value is self.batch:
            b = self.batch
            rows = [*zip(b.token, b.pos, b.n_seq_id, b.seq_id, b.logits, strict=True)][: b.n_tokens]
            return "; ".join(f"{t} at {p} of {n} {s}{' wanted' * bool(w)}" for t, p, n, (s,), w in rows)
        return str(vars(value)) if isinstance(value, SimpleNamespace) else str(value)


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    fake = Bindings()
    monkeypatch.setattr(llama_cpp, "llama_cpp", lambda: fake)
    return fake


def test_a_model_is_loaded_with_room_for_its_rows(bindings: Bindings) -> None:
    model = llama_cpp.LlamaCpp(Path("a/b.gguf"), rows=2, context=3)
    assert bindings.calls[:3] == [
        "model_default_params",
        f"model_load_from_file {b'a/b.gguf'} {{'n_gpu_layers': 0}}",
        "model_get_vocab model",
    ]
    settings = {"n_ctx": 6, "n_seq_max": 2, "n_batch": 3}
    threads = dict.fromkeys(("n_threads_batch", "n_threads"), torch.get_num_threads())
    assert vars(bindings.given["llama_context_default_params"]) == settings | threads
    assert bindings.calls[-2:] == ["get_memory context", "batch_init 3 0 1"]
    del model
    assert [call.split()[0] for call in bindings.calls[-3:]] == ["batch_free", "free", "model_free"]
    llama_cpp.LlamaCpp(Path("b.gguf"), rows=4, context=3)
    assert "batch_init 4 0 1" in bindings.calls, "at least a token for each row"


def test_a_step_stands_behind_the_prompt_and_is_forgotten(bindings: Bindings) -> None:
    step = decoders.llama_cpp_steps(Path("b.gguf"), [7, 8, 9], 2)
    assert bindings.calls[-4:] == [
        "memory_clear memory True",
        "decode context 7 at 0 of 1 0; 8 at 1 of 1 0; 9 at 2 of 1 0 wanted",
        bindings.calls[-2],
        "memory_seq_cp memory 0 1 -1 -1",
    ]
    for _ in range(2):
        (logits,) = step()
        assert logits.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
        assert bindings.calls[-4:] == [
            "decode context 9 at 3 of 1 0 wanted; 9 at 3 of 1 1 wanted",
            "get_logits context",
            "memory_seq_rm memory 0 3 -1",
            "memory_seq_rm memory 1 3 -1",
        ]
    del step
    assert bindings.calls[-1] == "model_free model"


def test_a_prompt_is_read_alone_and_scored_token_by_token(bindings: Bindings) -> None:
    (logits,) = decoders.llama_cpp_prompt(Path("b.gguf"), [7, 8])()
    assert logits.tolist() == [[0, 1, 2, 3, 4]]
    model = llama_cpp.LlamaCpp(Path("b.gguf"), 1, 3)
    assert model.read([4, 5], every=True).tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert bindings.calls[-2] == "decode context 4 at 0 of 1 0 wanted; 5 at 1 of 1 0 wanted"
    bindings.logits[0] = 9
    assert model.step(3)[0, 0] == 9
    assert bindings.calls[-3] == "decode context 3 at 2 of 1 0 wanted"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("llama_model_load_from_file", None, "it cannot load b.gguf"),
        ("llama_init_from_model", None, "it cannot create a context of 2 rows of 3 tokens"),
        ("llama_decode", 4, "llama_decode failed with code 4"),
    ],
)
def test_what_it_refuses_is_told(name: str, value: object, told: str, bindings: Bindings) -> None:
    bindings.given[name] = value
    with pytest.raises(UnsupportedCase, match=told):
        llama_cpp.LlamaCpp(Path("b.gguf"), 2, 3).read([1])


def test_the_bindings_are_silent_and_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llama_cpp.llama_cpp.cache_clear()
    fake = Bindings()
    monkeypatch.setattr(llama_cpp.importlib, "import_module", lambda name: fake)
    assert llama_cpp.llama_cpp() is llama_cpp.llama_cpp() is fake
    assert [call.split()[0] for call in fake.calls] == ["log_callback", "log_set", "backend_init"]
    assert llama_cpp.system_info() == "AVX512 = 1"
    llama_cpp.llama_cpp.cache_clear()

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(llama_cpp.importlib, "import_module", missing)
    with pytest.raises(UnsupportedCase, match=r"llama-cpp-python is not installed.*GGML_NATIVE=ON"):
        llama_cpp.llama_cpp()
