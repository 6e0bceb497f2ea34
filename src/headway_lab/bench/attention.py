"""The rows of `headway bench attention`, one after the other, each beside its peers and beside torch with MKL's full
path.

MKL takes its widest code on AMD processors only where it believes that they are Intel's: it detects the vendor by a
function of its own, and one line of C++, loaded before it, answers yes. Nothing else changes, and the library that
torch ships is the one that runs.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from headway.attention.select import AUTO, named
from headway.errors import BuildError
from headway.hardware import cores, cpu_vendor, gemm_peak
from headway.native.build import compiler
from headway_lab.bench.cases import BOTH, FORWARD, TRAIN, Case
from headway_lab.bench.measure import THOROUGH, Effort, measure
from headway_lab.bench.rows import Row
from headway_lab.bench.subprocess_runner import SubprocessRunner
from headway_lab.profiling import doublings

Say = Callable[[str], None]


def scaling() -> tuple[int, ...]:
    """1, 2, 4, ... threads, and as many as there are cores."""
    return tuple(dict.fromkeys([*doublings(1, cores()), cores()]))


def attention(
    cases: Sequence[Case],
    *,
    dtypes: Sequence[str] = BOTH,
    passes: Sequence[str] = (FORWARD, TRAIN),
    backend: str = AUTO,
    threads: Sequence[int] = (),
    tuned: bool = True,
    effort: Effort = THOROUGH,
    say: Say,
) -> Iterator[Row]:
    """Row by row, as they are measured: every case in those of its dtypes and passes that are named, at each number of
    `threads`. `tuned` adds the other baseline; `say` gets progress and what is left out.

    Raises BackendError for a backend that does not exist."""
    if backend != AUTO:
        named(backend)
    before, reported = torch.get_num_threads(), set[str]()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        other = _tuned(stack, say) if tuned else None
        for count, case in product(threads or (before,), cases):
            torch.set_num_threads(count)
            for dtype, direction in product(case.dtypes, case.passes):
                if dtype not in dtypes or direction not in passes:
                    continue
                say(f"{case.label(direction)} {dtype}, {count} {'thread' if count == 1 else 'threads'}")
                row = measure(case, dtype, direction, backend, effort)
                if other is not None and row.ours_ms is not None:
                    theirs = other.call(measure, case, dtype, direction, backend, effort)
                    row.machine["tuned_peers"] = theirs.peers
                    row = replace(row, ratio_best_tuned=theirs.ratio_best_peer)
                for note in (note for note in row.notes if note not in reported):
                    say(f"  {note}")
                reported |= set(row.notes)
                yield row


def _tuned(stack: ExitStack, say: Say) -> SubprocessRunner | None:
    """The process in which MKL takes its full path; None where that cannot be had."""
    reason = no_full_path()
    if reason is not None:
        say(f"no tuned baseline: {reason}")
        return None
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headway-bench-")))
    runner = stack.enter_context(SubprocessRunner(full_path(folder)))
    theirs, own = runner.call(gemm_peak, torch.float32), gemm_peak(torch.float32)
    say(
        f"torch's float32 product: {own / 1e9:.0f} GFLOP/s as it comes, {theirs / 1e9:.0f} with MKL's full path"
    )
    return runner


SHIM = 'extern "C" int mkl_serv_intel_cpu_true(void) { return 1; }\n'


def no_full_path() -> str | None:
    """Why there is no such baseline here; None where there is."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "it is made for Linux on x86-64"
    if not torch.backends.mkl.is_available():
        return "this torch has no MKL"
    if "GenuineIntel" in cpu_vendor():
        return "this is an Intel processor: MKL takes its full path already"
    try:
        compiler()
    except BuildError as why:
        return str(why)
    return None


def full_path(folder: Path) -> dict[str, str]:
    """Compile the one line into `folder`; the variables of a process that loads it first."""
    library = folder / "shim.so"
    command = [*compiler(), "-shared", "-fPIC", "-O1", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=SHIM.encode(), check=True, capture_output=True)
    return {"LD_PRELOAD": f"{library} {os.environ.get('LD_PRELOAD', '')}".strip()}
