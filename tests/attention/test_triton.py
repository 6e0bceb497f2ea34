"""The Triton kernel that splits the keys of a decode step: interpreted, and compiled for GPUs without one present."""

import os
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest
import torch
from hypothesis import given

from headway.attention.backends.triton import backend as split_decode
from headway.patterns import Causal, Chunk, Full, GlobalKeys, GlobalQueries, Pattern, Sink, Window
from headway.patterns.primitives import Kind
from headway.patterns.program import terms
from headway.tokens import Tokens
from tests.strategies import patterns, tokens

if not split_decode.has_triton():
    pytest.skip("Triton is not installed; it has wheels for Linux only", allow_module_level=True)


@given(patterns, tokens(), tokens())
def test_terms_are_the_pattern(pattern: Pattern, q: Tokens, k: Tokens) -> None:
    leaves = {
        Kind.FULL: lambda *_: Full(),
        Kind.CAUSAL: lambda *_: Causal(),
        Kind.WINDOW: lambda first, last, step: Window(-first // step, last // step, step),
        Kind.SINK: lambda first, last, step: Sink(last),
        Kind.CHUNK: lambda first, last, step: Chunk(last),
        Kind.GLOBAL_KEYS: lambda *_: GlobalKeys(),
        Kind.GLOBAL_QUERIES: lambda *_: GlobalQueries(),
    }
    allowed = [
        reduce(torch.logical_and, [leaves[kind](*arguments).allows(q, k) for kind, *arguments in term])
        for term in terms(pattern)
    ]
    expected = pattern.allows(q, k)
    assert torch.equal(reduce(torch.logical_or, allowed).expand_as(expected), expected)


def test_the_kernel_is_dense(request: pytest.FixtureRequest) -> None:
    """Runs `triton_cases.py`, on a GPU if there is one, else in Triton's interpreter."""
    cases = Path(__file__).with_name("triton_cases.py")
    slow = ["--slow"] if request.config.getoption("--slow") else []
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(cases), *slow],
        env={**os.environ, **interpret},
        cwd=request.config.rootpath,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-2000:]
    assert " passed" in process.stdout


COMPILE = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from headway.attention.backends.triton import backend as split_decode
from headway.attention.call import Call
from headway.attention.key_values import KeyValues
from headway.heads import Heads
from headway.patterns import parse
from headway.tokens import Tokens

class Absent:
    def __init__(self, capability): self.capability = capability
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", self.capability, 32)

compile = JITFunction.run
built = []
JITFunction.run = lambda self, *a, grid, warmup, **k: built.append(compile(self, *a, grid=grid, warmup=True, **k))

driver.set_active(Absent(int(sys.argv[1])))
for dtype, queries, group, width in (
    (torch.bfloat16, 1, 4, 128), (torch.float16, 3, 5, 64), (torch.float32, 16, 1, 24)
):
    q, k = (torch.zeros(2, 2 * g, n, width, dtype=dtype) for g, n in ((group, queries), (1, 300)))
    tokens = Tokens.packed([[200, 100]]).with_global(torch.arange(300).unsqueeze(0) < 3)
    slots = torch.zeros(1, 300, dtype=torch.int32) if dtype == torch.bfloat16 else None
    keys = KeyValues(k, k, tokens, slots=slots)
    pattern = parse("(Window.last(9, step=3) | GlobalKeys() | GlobalQueries()) & Causal() | Sink(4)")
    call = Call(q, tokens.slice(0, queries), (keys,), pattern, Heads.of(2 * group, 2), 1.0)
    split_decode.forward(call)
    made = built[-1]
    assert made.asm["cubin"], "no machine code"
    print(dtype, made.metadata.shared)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared"), [(80, 163 << 10), (86, 99 << 10), (90, 227 << 10)])
def test_the_kernel_compiles_for_gpus(capability: int, shared: int) -> None:
    """Compiles to machine code through the launch itself, with a fake driver; blocks fit the shared memory.

    Sizes per block: CUDA C++ Programming Guide, table "Technical specifications per compute capability".
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    process = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability)], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert len(lines) == 3
    assert all(int(line.split()[1]) <= shared for line in lines)
