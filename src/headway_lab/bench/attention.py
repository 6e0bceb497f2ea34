"""The rows of `headway bench attention`, one after the other, each beside its peers and beside torch with MKL's full
path.

MKL takes its widest code on AMD processors only where it believes that they are Intel's: it detects the vendor by a
function of its own, and one line of C, loaded before it, answers yes. Nothing else changes, and the library that torch
ships is the one that runs.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from pathlib import Path

import torch

from headway.attention import BACKENDS
from headway.attention.backends.native.backend import NATIVE
from headway.attention.select import AUTO
from headway.errors import BackendError, did_you_mean
from headway.hardware import cores, cpu_vendor, gemm_peak
from headway_lab.bench.cases import BOTH, FORWARD, TRAIN, Case
from headway_lab.bench.measure import THOROUGH, Effort, measure
from headway_lab.bench.rows import Row
from headway_lab.bench.subprocess_runner import SubprocessRunner
from headway_lab.profiling import doublings

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be measured: every case in its dtypes and passes, as far as `dtypes` and `passes` name them (empty:
    all), at each number of `threads`; `tuned` adds the other baseline. With `seconds`, every case has a row before any
    has two, and no row starts that would end later if it took as long as the longest before it."""

    cases: Sequence[Case]
    dtypes: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    backend: str = "auto"
    threads: tuple[int, ...] = ()
    tuned: bool = True
    effort: Effort = THOROUGH
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_backend(self.backend)


def check_backend(name: str) -> None:
    """Raises BackendError for a backend that does not exist."""
    if name != AUTO and name not in BACKENDS:
        raise BackendError(
            f"bench: unknown backend {name!r}{did_you_mean(name, BACKENDS)}; known: auto, {', '.join(BACKENDS)}"
        )


def scaling() -> tuple[int, ...]:
    """1, 2, 4, ... threads, and as many as there are cores."""
    return tuple(dict.fromkeys([*doublings(1, cores()), cores()]))


def attention(request: Request, say: Say) -> Iterator[Row]:
    """Row by row, as they are measured; `say` gets progress and what is left out."""
    begin, threads = time.monotonic(), torch.get_num_threads()
    reported: set[str] = set()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        tuned = _tuned(stack, say) if request.tuned else None
        for count in request.threads or (threads,):
            torch.set_num_threads(count)
            longest, planned = 0.0, _planned(request)
            for number, (case, dtype, direction) in enumerate(planned):
                started = time.monotonic()
                if request.seconds is not None and started - begin + longest > request.seconds:
                    left = ", ".join(f"{c.label(p)} {d}" for c, d, p in planned[number:])
                    say(f"the {request.seconds:.0f} seconds are used up; left out: {left}")
                    return
                say(f"{case.label(direction)} {dtype}, {count} {'thread' if count == 1 else 'threads'}")
                row = _row(case, dtype, direction, request, tuned)
                for note in (note for note in row.notes if note not in reported):
                    say(f"  {note}")
                reported |= set(row.notes)
                longest = max(longest, time.monotonic() - started)
                yield row


def _planned(request: Request) -> list[tuple[Case, str, str]]:
    """(case, dtype, pass) of every row, in order."""
    by_case = [
        [
            (case, dtype, direction)
            for dtype, direction in product(case.dtypes, case.passes)
            if dtype in (request.dtypes or BOTH) and direction in (request.passes or (FORWARD, TRAIN))
        ]
        for case in request.cases
    ]
    turns = by_case if request.seconds is None else zip_longest(*by_case)
    return [row for turn in turns for row in turn if row is not None]


def _row(case: Case, dtype: str, direction: str, request: Request, tuned: SubprocessRunner | None) -> Row:
    if case.level is not None:
        return _forced(case, dtype, direction, request)
    row = measure(case, dtype, direction, request.backend, request.effort)
    if tuned is None or row.ours_ms is None:
        return row
    other = tuned.call(measure, case, dtype, direction, request.backend, request.effort)
    row.machine["tuned_peers"] = other.peers
    return replace(row, ratio_best_tuned=other.ratio_best_peer)


def _forced(case: Case, dtype: str, direction: str, request: Request) -> Row:
    """A row of another CPU level, in a process of its own. Its peers are torch's, at torch's own level."""
    assert case.level is not None
    try:
        if request.backend not in (AUTO, NATIVE.name):
            raise BackendError(f"level {case.level} is one of backend native, which is not what is measured")
        with SubprocessRunner({"HEADWAY_NATIVE": case.level}) as runner:
            return runner.call(measure, case, dtype, direction, NATIVE.name, request.effort)
    except BackendError as why:
        where = {"threads": torch.get_num_threads(), "notes": [f"not measured: {why}"]}
        return Row("attention", case.label(direction), dtype, machine=where)


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


SHIM = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"


def no_full_path() -> str | None:
    """Why there is no such baseline here; None where there is."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "it is made for Linux on x86-64"
    if not torch.backends.mkl.is_available():
        return "this torch has no MKL"
    if "GenuineIntel" in cpu_vendor():
        return "this is an Intel processor: MKL takes its full path already"
    if compiler() is None:
        return "it needs a C compiler (cc, gcc or clang, or CC), and none was found"
    return None


def compiler() -> str | None:
    """The C compiler at hand."""
    names = [name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name]
    return next((path for name in names if (path := shutil.which(name.split()[0]))), None)


def full_path(folder: Path) -> dict[str, str]:
    """Compile the one line into `folder`; the variables of a process that loads it first."""
    found, library = compiler(), folder / "shim.so"
    assert found is not None, "ask no_full_path() first"
    command = [found, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=SHIM.encode(), check=True, capture_output=True)
    return {"LD_PRELOAD": f"{library} {os.environ.get('LD_PRELOAD', '')}".strip()}
