"""The kernels of a level, and a small library of every level: what says which library it is, without the kernels, is
compiled in a second."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from headway import hardware
from headway.errors import BackendError, BuildError
from headway.native import build, loader

LEVELS = [level for level in build.levels() if loader.NEEDS[level] <= hardware.cpu_flags()]
Use = Callable[[str], None]


def at_levels(law: int) -> pytest.MarkDecorator:
    """`parametrize` of the level. Quick are the best one of this CPU and one of the others, for each law the next; slow
    ones try every level."""
    quick = {LEVELS[0], LEVELS[1:][law % (len(LEVELS) - 1)]} if LEVELS[1:] else set(LEVELS)
    return pytest.mark.parametrize(
        "level", [pytest.param(level, marks=() if level in quick else pytest.mark.slow) for level in LEVELS]
    )


@dataclass(frozen=True)
class Small:
    """Libraries in `folder`, built from the few `sources`."""

    folder: Path
    sources: Path

    def copy(self, to: Path) -> "Small":
        """The same in another place, to be broken there."""
        return Small(*(Path(shutil.copytree(path, to / path.name)) for path in (self.folder, self.sources)))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    root = tmp_path_factory.mktemp("native")
    made = Small(root / "lib", root / "csrc")
    made.sources.mkdir()
    for name in ("headway.h", "team.h", "vec.h", "words.h", "measure.cpp"):
        shutil.copy(build.SOURCES / name, made.sources)
    try:
        build.compiler()
    except BuildError as error:
        pytest.skip(str(error))
    build.build(made.folder, sources=made.sources, say=lambda _: None)
    return made


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Makes the kernels of a level those that run."""
    folder = Path(os.environ.get("HEADWAY_NATIVE_DIR") or build.LIBRARIES)

    def choose(level: str) -> None:
        try:
            found = loader.Found(loader.open_library(folder, level))
        except BackendError as error:
            pytest.skip(str(error))
        monkeypatch.setattr(loader, "search", lambda: found)

    return choose


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
