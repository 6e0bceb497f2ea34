"""Blocked attention is linear in the length: no tensor of size T x S exists, and peak memory grows with n."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from headway.attention import attend
from headway.patterns import Causal, Pattern, Sink, Window


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        sizes = [
            t.untyped_storage().nbytes() // t.element_size() for t in tree_iter(result) if torch.is_tensor(t)
        ]
        self.numel = max([self.numel, *sizes])
        return result


def largest(pattern: Pattern, n: int, backend: str) -> int:
    q = torch.randn(1, 2, n, 4, requires_grad=True)
    with Largest() as seen:
        attend(q, q, q, pattern, backend=backend).sum().backward()
    return seen.numel


@pytest.mark.parametrize(
    "pattern",
    [Window.last(64), Window.around(32), Window.last(33, step=2), Window.last(64) | Causal() & Sink(4)],
    ids=str,
)
def test_no_tensor_of_queries_times_keys(pattern: Pattern) -> None:
    small, large = largest(pattern, 2048, "banded"), largest(pattern, 8192, "banded")
    assert large < 8192 * 8192 / 8
    assert large <= 4 * small * 1.05
    assert largest(pattern, 2048, "dense") >= 2048 * 2048


PEAK = """
import re, sys, torch
from headway.attention import attend
from headway.patterns import Window
torch.set_num_threads(1)
def memory(what):
    return int(re.search(what + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])
def run(n):
    q, k, v = (torch.randn(1, 4, n, 64, requires_grad=True) for _ in range(3))
    attend(q, k, v, Window.last(512), backend="banded").sum().backward()
run(2048)
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
run(int(sys.argv[1]))
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
def test_the_peak_of_forward_and_backward_grows_linearly() -> None:
    peaks = {}
    for n in (16384, 32768, 65536):
        result = subprocess.run(
            [sys.executable, "-c", PEAK, str(n)], capture_output=True, text=True, check=True
        )
        peaks[n] = int(result.stdout) / 1024
    print("peak MiB beyond n = 2048:", peaks)
    for n in (16384, 32768):
        assert 1.5 < peaks[2 * n] / peaks[n] < 2.5, peaks
    assert peaks[65536] < 65536 * 65536 * 4 / 2**20 / 16
