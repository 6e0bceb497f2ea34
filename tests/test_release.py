"""Wheels of `packages/wheels.py`: each is opened; this machine's is installed in an environment without a compiler.

HEADWAY_WHEELS names a folder of wheels; without it they are built from the tree as it is. Compiled libraries are kept
in `build/wheels`; this machine's libraries are copied there from the source tree instead of being compiled again."""

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headway.checkpoints.saving import save_folder
from headway.native import build, levels
from tests.generate.conftest import small
from tests.text.conftest import byte_level
from tests.text.test_chat import TURNS, with_template

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[1]
HERE = f"{sys.platform}-{platform.machine()}"
ELF_MACHINES = {62: "x86_64", 183: "aarch64"}  # the field e_machine of ELF
NAME = re.compile(r"headway-[\w.]+-py3-none-manylinux_2_28_(\w+)\.whl")


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of distributions, built once for all workers."""
    if folder := os.environ.get("HEADWAY_WHEELS"):
        return Path(folder).absolute()
    cache = ROOT / "build" / "wheels"
    (machine_folder := cache / HERE).mkdir(parents=True, exist_ok=True)
    for library in build.LIBRARIES.glob("libheadway_*"):
        shutil.copy(library, machine_folder)
    out = tmp_path_factory.getbasetemp().parent / "dist"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            script = [
                sys.executable,
                "packages/wheels.py",
                "--as-it-is",
                "--out",
                str(out),
                "--keep",
                str(cache),
            ]
            process = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
            assert process.returncode == 0, process.stdout + process.stderr
    return out


@pytest.fixture
def wheels(dist: Path) -> dict[str, Path]:
    """Returns the wheels of headway by architecture."""
    by_machine = {name[1]: path for path in dist.glob("headway-*.whl") if (name := NAME.fullmatch(path.name))}
    assert len(by_machine) == len([*dist.glob("headway-*.whl")])
    assert platform.machine() in by_machine
    return by_machine


def test_each_wheel_has_every_level_and_licence_page_and_recipes(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    for machine, path in wheels.items():
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder := tmp_path / machine)
        package = folder / "headway"
        libraries = {library.name: library for library in (package / "native" / "lib").iterdir()}
        assert set(libraries) == {build.file_name(level) for level in levels.known(machine)}
        for level in levels.known(machine):
            library, sources = libraries[build.file_name(level)], package / "native" / "csrc"
            assert build.built_hash(library) == build.source_hash(level, sources)
            assert ELF_MACHINES[int.from_bytes(library.read_bytes()[18:20], "little")] == machine
        (about,) = folder.glob("headway-*.dist-info")
        assert (about / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
        assert "<html" in (package / "serve" / "page" / "index.html").read_text(encoding="utf-8")
        shipped = {file.name for file in (package / "recipes" / "shipped").iterdir()}
        assert shipped == {file.name for file in (ROOT / "recipes").iterdir()}
        assert not (folder / "headway_lab").exists()
        assert not [*folder.glob("headway.libs/*")], "OpenMP must be torch's own"


def test_each_wheel_asks_for_no_glibc_that_is_newer_than_2_28(wheels: dict[str, Path]) -> None:
    """With the OpenMP that it uses, torch's. `auditwheel` reads the versions from the binaries, not from the name."""
    openmp = str(Path(torch.__file__).parent / "lib")
    for path in wheels.values():
        command = [sys.executable, "-m", "auditwheel", "show", "--ldpaths", openmp, str(path)]
        process = subprocess.run(command, check=True, capture_output=True, text=True)
        versions = re.findall(r"GLIBC_2\.(\d+)", process.stdout)
        assert versions
        assert max(map(int, versions)) <= 28, process.stdout


PICTURES = ("matplotlib", "mpl_toolkits")
NOT_SHARED = ("headway", "_headway", "__pycache__")


@pytest.fixture(scope="session")
def alone(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the python of an environment with this machine's wheel, and links to its dependencies here: pip fetches
    nothing, and fails if a dependency is missing."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    share(folder, lambda name: not name.startswith((*NOT_SHARED, *PICTURES)))
    (wheel,) = dist.glob(f"headway-*_{platform.machine()}.whl")
    python = folder / "bin" / "python"
    install(python, wheel)
    return python


def share(folder: Path, wanted: Callable[[str], bool]) -> None:
    """Links the wanted packages of this environment into the environment in `folder`."""
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for path in (
        entry for place in map(Path, sys.path) if place.name == "site-packages" for entry in place.iterdir()
    ):
        if wanted(path.name) and path.suffix != ".pth" and not (site_packages / path.name).exists():
            (site_packages / path.name).symlink_to(path)


def install(python: Path, *words: str | Path) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--no-index", *words]
    process = subprocess.run([*map(str, command)], capture_output=True, text=True, env=bare(python))
    assert process.returncode == 0, process.stderr


def bare(python: Path, **variables: str) -> dict[str, str]:
    """Returns the variables of a command: no compiler in PATH, no sources to import."""
    paths = {"PATH": str(python.parent), "HOME": str(python.parents[1])}
    return {**paths, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}


def typed(
    python: Path, folder: Path, *words: str, given: str = "", code: int = 0, **variables: str
) -> tuple[str, str]:
    """Runs a command of the installed package, and returns what it prints on stdout and stderr."""
    command = [str(python.parent / "headway"), *words]
    process = subprocess.run(
        command, cwd=folder, input=given, capture_output=True, text=True, env=bare(python, **variables)
    )
    assert process.returncode == code, f"{command}\n{process.stdout}\n{process.stderr}"
    return process.stdout, process.stderr


def test_an_installed_wheel_runs_without_a_compiler(alone: Path, tmp_path: Path) -> None:
    best = levels.of_this_machine()[0]
    out, err = typed(alone, tmp_path, "doctor")
    assert f"level {best}, in {alone.parents[1]}" in out
    assert "everything that headway needs is here" in out
    assert "headway:" not in err
    save_folder(tmp_path / "small", small(context=512), tokenizer=with_template(byte_level(), TURNS))
    talk = ("chat", "small", "-n", "6", "-t", "0")
    reply, _ = typed(alone, tmp_path, *talk, given="hello\n")
    assert reply.strip()
    settings, _ = typed(alone, tmp_path, "train", "--config", "recipes/small.yaml", "--print-config")
    assert "optimizer: muon" in settings
    _, err = typed(alone, tmp_path, "demo", code=2)
    assert 'pip install "headway[lab]"' in err


OPEN = """
from pathlib import Path
from headway.native import loader
print(loader.library().path)
print(*sorted({line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "gomp" in line}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is of Linux")
def test_one_openmp_serves_torch_and_the_kernels(alone: Path) -> None:
    """Two OpenMP libraries would have two thread pools that compete for the CPUs."""
    command = [str(alone), "-c", OPEN]
    process = subprocess.run(command, check=True, capture_output=True, text=True, env=bare(alone))
    library, *openmp = process.stdout.split()
    assert Path(library).is_relative_to(alone.parents[1])
    assert len(openmp) == 1
    assert "/torch/lib/" in openmp[0]


def test_without_kernels_it_says_so_once_with_the_cure(alone: Path, tmp_path: Path) -> None:
    save_folder(tmp_path / "small", small(context=512), tokenizer=with_template(byte_level(), TURNS))
    (nothing := tmp_path / "nothing").mkdir()
    variables = {"HEADWAY_NATIVE_DIR": str(nothing)}
    talk = ("chat", "small", "-n", "6", "-t", "0")
    reply, err = typed(alone, tmp_path, *talk, given="hello\nand?\n", **variables)
    assert reply.count("\n") == 2
    assert err.count("runs without its native kernels") == 1
    cure = "no C++ compiler: none of g++, clang++, c++ is in PATH; install one"
    assert f"none were built in {nothing}; {cure}" in err
    out, _ = typed(alone, tmp_path, "doctor", **variables)
    assert cure in out


def test_with_the_laboratory_its_commands_are_there(alone: Path, dist: Path, tmp_path: Path) -> None:
    with_lab = tmp_path / "with"
    shutil.copytree(alone.parents[1], with_lab, symlinks=True)
    python = with_lab / "bin" / "python"
    (lab,) = dist.glob("headway_lab-*.whl")
    share(with_lab, lambda name: name.startswith(PICTURES))
    install(python, lab)
    command = [str(python), "-m", "headway", "demo", "--quick", "--seconds", "5"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=bare(python))
    assert process.returncode == 0, process.stderr
    assert {"heads.png", "loss.png"} <= {path.name for path in (tmp_path / "runs" / "demo").iterdir()}
