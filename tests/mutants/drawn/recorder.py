"""A pytest plugin that records each test's seconds and the lines of `src` that it runs, also in its subprocesses.

`record.make` starts pytest with it and sets the environment that it needs. Coverage starts with every process there and
is told which test runs; the kernels are compiled so that they record the blocks of code that run.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import numpy as np
import pytest

OUT = "HEADWAY_MUTANTS_OUT"
TEST = "HEADWAY_MUTANTS_TEST"
"""Environment variable with the running test, for coverage in its subprocesses."""
KERNELS = "HEADWAY_MUTANTS_KERNELS"
KEPT = ("headway.hardware", "headway_lab.explain", "headway_lab.bench", "headway.attention.backends.flex")
"""Modules whose caches are kept between tests, since filling them is slow."""


def fixture_context(name: str, base: str) -> str:
    """Returns the coverage context of a fixture that several tests share; no test id looks like it."""
    return f"fixture {base}::{name}"


class Recorder:
    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self.modules: set[str] = set()
        self.caches: list[Any] = []
        self.dll: Any = None
        self.seen: Any = None

    def context(self, name: str) -> str:
        """Sets the coverage context to `name`, and returns the previous one."""
        before, os.environ[TEST] = os.environ.get(TEST, ""), name
        if current := coverage.Coverage.current():
            current.switch_context(name)
        return before

    def forget(self) -> None:
        """Empties function caches, so that every test runs the code that it needs, not only the first one."""
        for name in sys.modules.keys() - self.modules:
            self.modules.add(name)
            if name.partition(".")[0] in ("headway", "headway_lab", "tests") and not name.startswith(KEPT):
                values = vars(sys.modules[name]).values()
                self.caches += [v for v in values if hasattr(v, "cache_clear") and v.__module__ == name]
        for cached in self.caches:
            cached.cache_clear()

    def blocks(self) -> list[int]:
        """Returns the addresses of the kernel blocks that ran since the last call."""
        path = os.environ.get(KERNELS)
        if not path:
            return []
        if self.seen is None:
            dll = ctypes.CDLL(path)
            dll.headway_seen.restype = ctypes.c_void_p
            size = ctypes.c_size_t.in_dll(dll, "headway_seen_size").value
            self.dll = dll
            self.seen = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(dll.headway_seen()))
        run = np.flatnonzero(self.seen)
        self.seen[run] = 0
        return [int(x) for x in run]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self.forget()
        self.blocks()
        before = self.context(item.nodeid)
        self.tests[item.nodeid] = {"outcome": "passed"}
        began = time.monotonic()
        try:
            return (yield)
        finally:
            seconds = time.monotonic() - began
            self.context(before)
            fixtures = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
            shared = {
                fixture_context(f.argname, f.baseid) for x in fixtures for f in x if f.scope != "function"
            }
            self.tests[item.nodeid] |= {
                "seconds": round(seconds, 4), "fixtures": sorted(shared), "blocks": self.blocks()
            }  # fmt: skip

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        if fixturedef.scope == "function":
            return (yield)
        before = self.context(fixture_context(fixturedef.argname, fixturedef.baseid))
        try:
            return (yield)
        finally:
            self.context(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid in self.tests and report.outcome != "passed":
            self.tests[report.nodeid]["outcome"] = report.outcome

    def pytest_sessionfinish(self) -> None:
        if current := coverage.Coverage.current():
            current.switch_context("")
            current.save()
        if self.tests:
            Path(os.environ[OUT], f"tests-{os.getpid()}.json").write_text(json.dumps(self.tests))


def pytest_configure(config: pytest.Config) -> None:
    if OUT in os.environ:
        config.pluginmanager.register(Recorder(), "recorder")
