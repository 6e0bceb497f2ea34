"""A pytest plugin that writes what the tests of the kernels compute on this machine as cases for driver.cpp:

    python -m pytest -p tests.native.arm.record --cases cases.bin tests/native

A call becomes a case if a test compares its results with float64: with these results, and with the error that the test
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
"""Maximum number of bytes of a case; larger ones are counted and left out."""
MOST = 60
"""Maximum number of cases of one test: those of its first calls."""
LEAST = 16
"""Minimum number of bytes by which copied results are searched for."""
Check = tuple[str, int, str, np.ndarray, np.ndarray, np.ndarray]


class Recording:
    """The calls of the running test, and the checks of each."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, list[Check]]] = []
        self.left: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()

    def wrap(self, function: str, real: Any) -> Callable[..., int]:
        def run(*arguments: Any) -> int:
            if len(self.calls) >= MOST:
                return int(real(*arguments))
            try:
                call = taken(function, arguments)
            except Unknown as reason:
                self.left[f"{function}: no tensor has {reason}"] += 1
                return int(real(*arguments))
            code = int(real(*arguments))
            made(call)
            size = sum(map(len, call.before.values()))
            if code or size > LARGEST:
                self.left[f"{function}: {'fails' if code else 'too large'}"] += 1
            else:
                self.calls.append((call, []))
            return code

        return run

    def compare(self, label: str, actual: Tensor, expected: Tensor, tolerances: Tensor) -> None:
        """Finds results by their address or, if they have been copied, by their bytes."""
        if not actual.numel():
            return
        kind = str(actual.dtype).removeprefix("torch.")
        expected, tolerances = (t.detach().double().expand(actual.shape) for t in (expected, tolerances))
        if lying := self._lying(actual):
            self._keep(label, *lying, kind, expected, tolerances)
            return
        if self._copied(label, actual, kind, expected, tolerances):
            return
        rows = [t.detach().reshape(-1, actual.shape[-1]) for t in (actual, expected, tolerances)]
        found_rows = sum(self._copied(label, g, kind, r, a) for g, r, a in zip(*rows, strict=True))
        self.left["results that lie nowhere"] += len(rows[0]) - found_rows

    def _lying(self, actual: Tensor) -> tuple[list[Check], int, np.ndarray] | None:
        begin = actual.untyped_storage().data_ptr()
        index = torch.arange(actual.untyped_storage().nbytes() // actual.element_size())
        offsets = index.as_strided(actual.shape, actual.stride(), actual.storage_offset()).flatten()
        for call, checks in reversed(self.calls):
            if begin in call.after and call.after[begin] != call.before[begin]:
                data = torch.frombuffer(bytearray(call.after[begin]), dtype=actual.dtype)
                if torch.equal(data[offsets], actual.detach().flatten()):
                    return checks, begin, offsets.numpy()
        return None

    def _copied(self, label: str, actual: Tensor, kind: str, expected: Tensor, tolerances: Tensor) -> bool:
        data = actual.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        if len(data) < LEAST:
            return False
        for call, checks in reversed(self.calls):
            for address, written in call.changed():
                position = written.find(data)
                if (
                    position >= 0
                    and position % actual.element_size() == 0
                    and call.before[address].find(data) < 0
                ):
                    first = position // actual.element_size()
                    self._keep(
                        label,
                        checks,
                        address,
                        np.arange(first, first + actual.numel()),
                        kind,
                        expected,
                        tolerances,
                    )
                    return True
        return False

    @staticmethod
    def _keep(
        label: str,
        checks: list[Check],
        address: int,
        offsets: np.ndarray,
        kind: str,
        expected: Tensor,
        tolerances: Tensor,
    ) -> None:
        checks.append(
            (label, address, kind, offsets, expected.flatten().numpy(), tolerances.flatten().numpy())
        )

    def write(self, file: CaseFile, name: str) -> None:
        for call, checks in self.calls:
            if not checks:
                self.left[f"{call.function}: not compared with float64"] += 1
                continue
            for address, data in call.before.items():
                file.memory(address, data)
            file.links(call.links.items())
            file.call(call)
            for label, *details in checks:
                file.check(f"{name} {call.function} {label}", *details)
            file.end(name)
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
    """Returns the errors that `assert_within_reference` allows at a level, by default at the least strict one, which
    multiplies pairs of bf16. Numbers that are not finite must be equal."""
    least = tolerance.LEAST[dtype] * torch.finfo(dtype).eps
    finite = exact.masked_fill(~exact.isfinite(), 0.0)
    of_terms = torch.as_tensor(terms, dtype=torch.float64)
    size = finite.square().mean(-1, keepdim=True).sqrt().clamp_min(of_terms)
    error = ((low.double() - exact).abs() / size).nan_to_num(0.0, posinf=0.0).max().item()
    bound = tolerance.bound(check, level)
    return bound * max(error, least) * size


class Recorded:
    """A library whose calls are recorded."""

    def __init__(self, dll: ctypes.CDLL, recorder: Recording) -> None:
        self._dll, self._to = dll, recorder

    def __getattr__(self, name: str) -> Any:
        original = getattr(self._dll, name)
        return self._to.wrap(name, original) if name in FUNCTIONS else original


def _install() -> None:
    """Replaces these functions before any test imports them by name."""
    plain_open, within, once = (
        loader.open_library,
        tolerance.assert_within_reference,
        tolerance.assert_rounded_once,
    )

    def open_library(*arguments: Any, **options: Any) -> loader.Library:
        library = plain_open(*arguments, **options)
        return loader.Library(library.level, library.path, Recorded(library.dll, recording))  # type: ignore[arg-type]

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
    """Installs the plugin, which is loaded before the tests."""
    _install()
    parser.addoption("--cases", type=Path, required=True, help="the file that cases are written to")


@pytest.fixture(scope="session", autouse=True)
def cases(request: pytest.FixtureRequest) -> Iterator[CaseFile]:
    with CaseFile(request.config.getoption("--cases")) as file:
        yield file
        print(f"\n{file.cases} cases, {file.calls} calls, {file.checks} checks of {file.numbers} numbers")
        for name, count in (*recording.functions.most_common(), *recording.left.most_common()):
            print(f"{count:7} {name}")


@pytest.fixture(autouse=True)
def of_test(request: pytest.FixtureRequest, cases: CaseFile) -> Iterator[None]:
    recording.calls.clear()
    yield
    recording.write(cases, request.node.name)
