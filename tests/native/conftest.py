"""Fixtures that select the kernels of a level, and a small library of every level: it only reports its level, without
kernels, and is compiled in a second."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch

from headway.errors import BackendError, BuildError
from headway.native import build, levels, loader

EVERY_LEVEL = levels.of_this_machine()
BASES = [level for level in EVERY_LEVEL if level not in levels.STANDS_ON]
"""Levels that differ in more than how they multiply bytes, which changes no bit (test_levels.py)."""
OF_PAIRS = ("amx", "avx512bf16", "i8mm")
"""The levels that multiply pairs of bf16."""
Use = Callable[[str], None]


def at_levels(law: int, levels: Sequence[str] = BASES) -> pytest.MarkDecorator:
    """Returns `parametrize` over the levels of this machine. Not marked as slow are the best of `levels` and another
    one, which depends on `law`."""
    quick = {levels[0], levels[1 + law % (len(levels) - 1)] if levels[1:] else levels[0]}
    return pytest.mark.parametrize(
        "level",
        [pytest.param(level, marks=() if level in quick else pytest.mark.slow) for level in EVERY_LEVEL],
    )


def at_levels_and_dtypes(law: int, dtypes: Sequence[torch.dtype]) -> pytest.MarkDecorator:
    """Returns `parametrize` over dtypes and levels. Not marked as slow are the best level with the last dtype, and
    another level, which depends on `law`, with the first."""
    quick = {
        (dtypes[-1], BASES[0]),
        (dtypes[0], BASES[1 + law % (len(BASES) - 1)] if BASES[1:] else BASES[0]),
    }
    return pytest.mark.parametrize(
        ("dtype", "level"),
        [
            pytest.param(*case, marks=() if case in quick else pytest.mark.slow)
            for case in product(dtypes, EVERY_LEVEL)
        ],
        ids=str,
    )


@dataclass(frozen=True)
class Small:
    """Libraries in `folder`, built from the few `sources`."""

    folder: Path
    sources: Path

    def copy(self, target: Path) -> "Small":
        """Returns a copy in another place, which tests may break."""
        return Small(
            *(Path(shutil.copytree(path, target / path.name)) for path in (self.folder, self.sources))
        )


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    root = tmp_path_factory.mktemp("native")
    libraries = Small(root / "lib", root / "csrc")
    libraries.sources.mkdir()
    headers = [path.name for kind in ("vec_*.h", "headway*.h") for path in build.SOURCES.glob(kind)]
    for name in ("team.h", "vec.h", "words.h", "measure.cpp", *headers):
        shutil.copy(build.SOURCES / name, libraries.sources)
    try:
        build.compiler()
    except BuildError as error:
        pytest.skip(str(error))
    build.build(libraries.folder, sources=libraries.sources, say=lambda _: None)
    return libraries


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Returns a function that makes the kernels of a level the ones that run, or skips the test."""
    folder = Path(os.environ.get("HEADWAY_NATIVE_DIR") or build.LIBRARIES)

    def choose(level: str) -> None:
        try:
            search_result = loader.Found(loader.open_library(folder, level))
        except BackendError as error:
            pytest.skip(str(error))
        monkeypatch.setattr(loader, "search", lambda: search_result)

    return choose


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    previous = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(previous)
