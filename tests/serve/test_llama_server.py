"""llama.cpp's own tests of its server, run against ours through a shim (`shim/llama_server.py`).

They are copied from the source distribution of llama-cpp-python to a temporary folder and run there unchanged, in an
environment that they pin. Each function that needs no other model than stories260K passes or has its reason in
`shim/reasons.toml`.
"""

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headway.cli import run
from tests.data import data_path
from tests.serve.others import python_of, sources_of
from tests.serve.shim.forks import COMMAND

ROOT = Path(__file__).parents[2]
SHIM = Path(__file__).parent / "shim"
VERSION = "0.3.36"
FLOOR = 96
OTHERS = re.compile(r"ServerPreset\.(?!tinyllama2)|model_hf_repo|mmproj|models_dir|model_url|model_file")
"""Source text of functions that need another model."""


def functions(folder: Path) -> Iterator[str]:
    """Yields the functions that need stories260K alone, and are neither slow nor skipped, as FILE::NAME."""
    for path in sorted(folder.glob("test_*.py")):
        source = path.read_text()
        if "ServerPreset.tinyllama2" not in source:
            continue
        nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        unsupported = {node.name for node in nodes if OTHERS.search(ast.unparse(node))}
        for node in nodes:
            marks = " ".join(map(ast.unparse, node.decorator_list))
            needs = {node.name, *(argument.arg for argument in node.args.args)}
            asks_more = needs & unsupported or re.search(r"\b(slow|skip|skipif)\b", marks)
            if node.name.startswith("test_") and not asks_more:
                yield f"{path.name}::{node.name}"


@contextmanager
def prepared(folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yields a copy of their tests, with the files that they look for, and the environment variables to run them."""
    sources = sources_of("llama-cpp-python", VERSION) / "vendor" / "llama.cpp"
    tests = folder / "tools" / "server" / "tests"
    shutil.copytree(sources / "tools" / "server" / "tests", tests)
    shutil.copytree(sources / "models" / "templates", folder / "models" / "templates")
    stories = data_path("weights/stories260K")
    model_folder = folder / "shim" / "test-model-stories260K"
    arguments = ["convert", stories / "stories260K.bin", model_folder, "--tokenizer", stories / "tok512.bin"]
    assert run([str(argument) for argument in arguments]) == 0
    socket_path, command = folder / "door", folder / "llama-server"
    command.write_text(COMMAND.format(python=sys.executable, path=str(socket_path)))
    command.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {
        "LLAMA_SERVER_BIN_PATH": str(command),
        "SHIM_MODELS": str(model_folder.parent),
        "PORT": str(port),
    }
    forks = subprocess.Popen(
        [sys.executable, "-m", "tests.serve.shim.forks", socket_path], cwd=ROOT, env=os.environ | variables
    )
    try:
        deadline = time.monotonic() + 120
        while not socket_path.exists():
            assert forks.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield tests, os.environ | variables
    finally:
        forks.terminate()
        forks.wait(30)


def passed(tests: Path, environment: dict[str, str], names: list[str]) -> set[str]:
    """Returns those of these functions of which every case passed."""
    python = python_of("llama-tests", "-r", str(tests / "requirements.txt"))
    report = tests / "report.xml"
    files = sorted({f"unit/{name.partition('::')[0]}" for name in names})
    command = [python, "-m", "pytest", "-q", "-m", "not slow", f"--junitxml={report}", *files]
    (tests / "log.txt").write_bytes(
        subprocess.run(command, cwd=tests, env=environment, capture_output=True).stdout
    )
    outcomes: dict[str, bool] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name', '').partition('[')[0]}"
        outcomes[name] = outcomes.get(name, True) and not len(case.findall("failure") + case.findall("error"))
    return {name for name in names if outcomes.get(name)}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_their_tests_pass_or_have_a_reason(tmp_path: Path) -> None:
    with prepared(tmp_path) as (tests, environment):
        names = list(functions(tests / "unit"))
        passing = passed(tests, environment, names)
    reasons = tomllib.loads((SHIM / "reasons.toml").read_text())
    excused = {f"{file}.py::{name}" for file, names_of_file in reasons.items() for name in names_of_file}
    assert sorted(set(names) - passing - excused) == []
    assert sorted(excused & passing) == [], "these pass, and need no reason any longer"
    assert sorted(excused - set(names)) == []
    assert len(passing) >= FLOOR


def test_the_shim_knows_flags_and_names_only() -> None:
    source = (SHIM / "llama_server.py").read_text()
    assert len(source.splitlines()) <= 200
    tree = ast.parse(source)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    words = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings
    ]
    assert len(words) > 60
    for word in " ".join(words).split():
        assert re.fullmatch(r"[a-z0-9_./{},-]+|SHIM_MODELS|POST", word), word
        assert not word.startswith("test_")
