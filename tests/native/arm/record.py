"""A pytest plugin that writes what the tests of the kernels compute on this machine as cases for driver.cpp:

    python -m pytest -p tests.native.arm.record --cases cases.bin tests/native

A call is a case where a test compares what it has written with float64: with these results, and as far off as the test
allows. Calls that are compared otherwise (bits of two calls, exact integers by torch.equal) are no cases."""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headway.native import loader
from tests import tolerance
from tests.native.arm.calls import FUNCTIONS, Call, Unknown, made, taken
from tests.native.arm.files import CaseFile

LARGEST = 4 << 20
"""Bytes of a case; others are counted and left out."""
MOST = 60
"""Cases of one test: those of its first calls."""
LEAST = 16
"""Bytes by which copied results are found."""
Check = tuple[str, int, str, np.ndarray, np.ndarray, np.ndarray]


class Recording:
    """The calls of the test that runs, and what was checked of each."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, list[Check]]] = []
        self.left: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()

    def wrap(self, function: str, real: Any) -> Callable[..., int]:
        def run(*given: Any) -> int:
            if len(self.calls) >= MOST:
                return int(real(*given))
            try:
                call = taken(function, given)
            except Unknown as reason:
                self.left[f"{function}: no tensor has {reason}"] += 1
                return int(real(*given))
            code = int(real(*given))
            made(call)
            size = sum(map(len, call.before.values()))
            if code or size > LARGEST:
                self.left[f"{function}: {'fails' if code else 'too large'}"] += 1
            else:
                self.calls.append((call, []))
            return code

        return run

    def compare(self, what: str, got: Tensor, right: Tensor, allowed: Tensor) -> None:
        """Results are known by where they lie, or, where they have been copied, by their bytes."""
        if not got.numel():
            return
        kind = str(got.dtype).removeprefix("torch.")
        right, allowed = (t.detach().double().expand(got.shape) for t in (right, allowed))
        if found := self._lying(got):
            self._keep(what, *found, kind, right, allowed)
            return
        if self._copied(what, got, kind, right, allowed):
            return
        rows = [t.detach().reshape(-1, got.shape[-1]) for t in (got, right, allowed)]
        found_rows = sum(self._copied(what, g, kind, r, a) for g, r, a in zip(*rows, strict=True))
        self.left["results that lie nowhere"] += len(rows[0]) - found_rows

    def _lying(self, got: Tensor) -> tuple[list[Check], int, np.ndarray] | None:
        begin = got.untyped_storage().data_ptr()
        index = torch.arange(got.untyped_storage().nbytes() // got.element_size())
        offsets = index.as_strided(got.shape, got.stride(), got.storage_offset()).flatten()
        for call, checks in reversed(self.calls):
            if begin in call.after and call.after[begin] != call.before[begin]:
                data = torch.frombuffer(bytearray(call.after[begin]), dtype=got.dtype)
                if torch.equal(data[offsets], got.detach().flatten()):
                    return checks, begin, offsets.numpy()
        return None

    def _copied(self, what: str, got: Tensor, kind: str, right: Tensor, allowed: Tensor) -> bool:
        data = got.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        if len(data) < LEAST:
            return False
        for call, checks in reversed(self.calls):
            for at, written in call.changed():
                place = written.find(data)
                if place >= 0 and place % got.element_size() == 0 and call.before[at].find(data) < 0:
                    first = place // got.element_size()
                    self._keep(what, checks, at, np.arange(first, first + got.numel()), kind, right, allowed)
                    return True
        return False

    @staticmethod
    def _keep(
        what: str,
        checks: list[Check],
        at: int,
        offsets: np.ndarray,
        kind: str,
        right: Tensor,
        allowed: Tensor,
    ) -> None:
        checks.append((what, at, kind, offsets, right.flatten().numpy(), allowed.flatten().numpy()))

    def write(self, to: CaseFile, name: str) -> None:
        for call, checks in self.calls:
            if not checks:
                self.left[f"{call.function}: not compared with float64"] += 1
                continue
            for at, data in call.before.items():
                to.memory(at, data)
            to.links(call.links.items())
            to.call(call)
            for what, *rest in checks:
                to.check(f"{name} {call.function} {what}", *rest)
            to.end(name)
            self.functions[call.function] += 1
        self.calls.clear()


recording = Recording()


def allowance(
    exact: Tensor,
    low: Tensor,
    terms: Tensor | float,
    check: str,
    dtype: torch.dtype,
    level: str = "avx512bf16",
) -> Tensor:
    """How far off numbers may be for `assert_within_reference` at a level, by default that of which it asks least: one
    of pairs of bf16. Numbers that are not finite must be what they are."""
    least = tolerance.LEAST[dtype] * torch.finfo(dtype).eps
    finite = exact.masked_fill(~exact.isfinite(), 0.0)
    of_terms = torch.as_tensor(terms, dtype=torch.float64)
    size = finite.square().mean(-1, keepdim=True).sqrt().clamp_min(of_terms)
    error = ((low.double() - exact).abs() / size).nan_to_num(0.0, posinf=0.0).max().item()
    bound = tolerance.bound(check, level)
    return bound * max(error, least) * size


class Recorded:
    """A library whose calls are recorded."""

    def __init__(self, dll: ctypes.CDLL, to: Recording) -> None:
        self._dll, self._to = dll, to

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._dll, name)
        return self._to.wrap(name, real) if name in FUNCTIONS else real


def _install() -> None:
    """Before any test has taken these by name."""
    plain_open, within, once = (
        loader.open_library,
        tolerance.assert_within_reference,
        tolerance.assert_rounded_once,
    )

    def open_library(*given: Any, **named: Any) -> loader.Library:
        found = plain_open(*given, **named)
        return loader.Library(found.level, found.path, Recorded(found.dll, recording))  # type: ignore[arg-type]

    def assert_within_reference(
        got: Tensor, exact: Tensor, low: Tensor, what: str = "", terms: Tensor | float = 0.0, check: str = ""
    ) -> None:
        within(got, exact, low, what, terms, check)
        if exact.numel():
            of_check = check or tolerance._test(got.dtype)
            recording.compare(what, got, exact, allowance(exact, low, terms, of_check, got.dtype))

    def assert_rounded_once(
        got: Tensor, exact: Tensor, what: str = "", terms: Tensor | float = 0.0, ulps: int = 1
    ) -> None:
        once(got, exact, what, terms, ulps)
        of_terms = torch.as_tensor(terms, dtype=torch.float64)
        recording.compare(what, got, exact, ulps * tolerance.ulp(exact, got.dtype) + 2**-20 * of_terms)

    loader.open_library = open_library
    tolerance.assert_within_reference = assert_within_reference
    tolerance.assert_rounded_once = assert_rounded_once


def pytest_addoption(parser: pytest.Parser) -> None:
    """As a plugin, which is loaded before the tests."""
    _install()
    parser.addoption("--cases", type=Path, required=True, help="the file that cases are written to")


@pytest.fixture(scope="session", autouse=True)
def cases(request: pytest.FixtureRequest) -> Iterator[CaseFile]:
    with CaseFile(request.config.getoption("--cases")) as to:
        yield to
        print(f"\n{to.cases} cases, {to.calls} calls, {to.checks} checks of {to.numbers} numbers")
        for name, count in (*recording.functions.most_common(), *recording.left.most_common()):
            print(f"{count:7} {name}")


@pytest.fixture(autouse=True)
def of_test(request: pytest.FixtureRequest, cases: CaseFile) -> Iterator[None]:
    recording.calls.clear()
    yield
    recording.write(cases, request.node.name)
