"""Settings of every test: one thread, fixed seeds, English, warnings as errors, fresh memory full of NaN."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads would take the CPUs of other workers
os.environ["LC_ALL"] = "C"  # reports are in the language of the environment

import functools
import random
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from headway.native import build, levels
from headway.processor import cpu_flags
from headway.train import ending
from tests import operators

settings.register_profile(
    "fast", max_examples=20, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", settings.get_profile("fast"), max_examples=10)
settings.register_profile("thorough", settings.get_profile("fast"), max_examples=200)
settings.register_profile("explore", settings.get_profile("thorough"), derandomize=False, print_blob=True)


COLLECTED = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests too, and hypothesis for longer")
    parser.addoption("--peers", action="store_true", help="run the tests that ask llama.cpp, and no others")
    parser.addoption(
        "--newest", action="store_true", help="the tests of newest.toml must fail, for its reasons"
    )
    parser.addoption("--no-skips", action="store_true", help="a skipped test fails, with its reason")


def pytest_configure(config: pytest.Config) -> None:
    stale = [] if os.environ.get("HEADWAY_NATIVE") else stale_levels()
    if stale:
        pytest.exit(f"the native library is stale ({', '.join(stale)}): {build.COMMAND}", returncode=2)
    torch.set_num_threads(1)
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("thorough" if config.getoption("--slow") else "quick")
    if not config.getoption("--slow"):  # fsync and the picture take a third of a small run's time
        os.fsync = lambda descriptor: None  # type: ignore[assignment]
        ending.draw_curve = drawn_once(ending.draw_curve)


def drawn_once(draw: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that draws the curve of a process's first run; later runs get a copy of that picture."""
    picture = b""

    def call(records: object, path: Path, *options: object) -> None:
        nonlocal picture
        if not picture:
            draw(records, path, *options)
            picture = path.read_bytes()
        path.write_bytes(picture)

    return call


def stale_levels() -> list[str]:
    """Returns this CPU's levels whose library was built from other sources: their tests would be skipped, and their
    warning would fail every test that computes attention."""
    folder = Path(os.environ.get("HEADWAY_NATIVE_DIR") or build.LIBRARIES)
    built = [x for x in levels.runnable(cpu_flags(), tiles=True) if (folder / build.file_name(x)).exists()]
    return [x for x in built if build.built_hash(folder / build.file_name(x)) != build.source_hash(x)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def wanted(item: pytest.Item) -> bool:
        peers, slow = (item.get_closest_marker(name) is not None for name in ("peers", "slow"))
        return (
            peers if config.getoption("--peers") else not peers and (config.getoption("--slow") or not slow)
        )

    config.stash[COLLECTED] = [item.nodeid for item in items]
    if config.getoption("--newest"):
        reasons = tomllib.loads(Path(__file__).with_name("newest.toml").read_text())["differences"]
        for item in items:
            if reason := reasons.get(item.nodeid):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    left_out = [item for item in items if not wanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if wanted(item)]


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    if config.getoption("--no-skips") and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped, which --no-skips forbids: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    _forbid_skip(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    _forbid_skip(report, collector.config)
    return report


@pytest.fixture(scope="session")
def collected(pytestconfig: pytest.Config) -> list[str]:
    """Returns all tests of the files that run, including slow ones that are deselected."""
    return pytestconfig.stash[COLLECTED]


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:  # the same, without looking for other devices, which takes longer than most tests
        torch.default_generator.manual_seed(0)


def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns the function with its fresh floating-point memory filled with NaN."""

    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if type(tensor) is torch.Tensor and tensor.is_floating_point() and not tensor.is_meta:
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return call


@pytest.fixture(autouse=True, scope="session")
def _poison() -> Iterator[None]:
    """Fills fresh memory with NaN, so that reading it before writing shows."""
    with torch.device("meta"):
        torch.empty(1)  # the first `with torch.device(...)` collects constructors; it must see the originals
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, poisoned(getattr(torch, name)))
        for name in ("new_empty", "new_empty_strided"):
            patch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))
        yield


@pytest.fixture
def plain_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses formulas in place of fused operators."""
    operators.plain(monkeypatch)
