"""A library names what it does not know of a call, and computes nothing."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.attention import attend
from headway.errors import BackendError
from headway.native import interface as c
from headway.native import loader, rows
from headway.native.linear import linear
from headway.patterns import Causal
from headway.scores import SoftCap
from tests.native.conftest import Use, at_levels

UNKNOWN = c.ERRORS[3]


class Spoiling:
    """The functions of a library, but the structure that `function` is called with has another value in `field`."""

    def __init__(self, dll: ctypes.CDLL, function: str, field: str, value: int) -> None:
        self.dll, self.function, self.field, self.value = dll, function, field, value

    def __getattr__(self, name: str) -> Callable[[Any], int]:
        call = getattr(self.dll, name)
        return self._spoilt(call) if name == self.function else call

    def _spoilt(self, call: Callable[[Any], int]) -> Callable[[Any], int]:
        def run(reference: Any) -> int:
            struct = reference._obj
            *path, last = self.field.split(".")
            for name in path:
                struct = struct.matrices[0] if name == "matrix" else getattr(struct, name)
            setattr(struct, last, self.value)
            return call(reference)

        return run


def attention(gradient: bool = False) -> None:
    q = torch.ones(1, 1, 3, 8, requires_grad=gradient)
    out = attend(q, q, q, Causal(), score=SoftCap(2.0), backend="native")
    if gradient:
        out.sum().backward()


X = torch.ones(2, 8)
RUNS: dict[str, Callable[[], Any]] = {
    "headway_forward": attention,
    "headway_backward": lambda: attention(gradient=True),
    "headway_linear": lambda: linear(X, [torch.ones(4, 8)]),
    "headway_norm_rows": lambda: rows.norm("rms", X, None, None, None, 1e-5),
    "headway_gate_rows": lambda: rows.gate("silu", X, None),
    "headway_rotate_rows": lambda: rows.rotate([X.view(1, 1, 2, 8)], X, X, "halves"),
    "headway_entropy_rows": lambda: rows.cross_entropy(X.clone(), None, torch.tensor([0, 1]), False),
}
UNKNOWN_VALUES = {
    "headway_forward": {"type": 2, "dim": 513, "dim_v": 513, "plan.tile": 97},
    "headway_backward": {
        "type": 2,
        "dim": 513,
        "dim_v": 513,
        "plan.tile": 97,
        "kv_type": 1,
        "score_count": 9,
    },
    "headway_linear": {"type": 2, "matrix.type": 5},
    "headway_norm_rows": {"type": 2},
    "headway_gate_rows": {"type": 2, "act": 6},
    "headway_rotate_rows": {"type": 2, "dim": 513, "count": 4},
    "headway_entropy_rows": {"type": -1},
}


@at_levels(2)
@pytest.mark.parametrize("function", RUNS)
def test_what_a_library_does_not_know_is_named(
    use: Use, level: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(level)
    library = loader.search().library
    assert library is not None
    RUNS[function]()
    for field, value in UNKNOWN_VALUES[function].items():
        dll: Any = Spoiling(library.dll, function, field, value)
        monkeypatch.setattr(loader, "search", lambda dll=dll: loader.Found(replace(library, dll=dll)))
        with pytest.raises(BackendError, match=UNKNOWN):
            RUNS[function]()
