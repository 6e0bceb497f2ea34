"""llama.cpp's own tests of its server, asked of ours through a shim (`shim/llama_server.py`).

They are copied from the source distribution of llama-cpp-python to a temporary folder and run there unchanged, in an
environment that they pin. Of those that need no other model than stories260K, each function passes or has its reason in
`shim/reasons.toml`.
"""

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headway.cli import run
from tests.data import data_path
from tests.serve.others import python_of, sources_of

SHIM = Path(__file__).parent / "shim"
VERSION = "0.3.36"
FLOOR = 85
OTHERS = re.compile(r"ServerPreset\.(?!tinyllama2)|model_hf_repo|mmproj|models_dir|model_url|model_file")
"""What a function says that needs another model."""


def functions(folder: Path) -> Iterator[str]:
    """The functions that need stories260K alone, and are neither slow nor skipped, as FILE::NAME."""
    for path in sorted(folder.glob("test_*.py")):
        source = path.read_text()
        if "ServerPreset.tinyllama2" not in source:
            continue
        for made in ast.parse(source).body:
            if isinstance(made, ast.FunctionDef) and made.name.startswith("test_"):
                marks = " ".join(map(ast.unparse, made.decorator_list))
                if not re.search(r"\b(slow|skip|skipif)\b", marks) and not OTHERS.search(ast.unparse(made)):
                    yield f"{path.name}::{made.name}"


def prepare(folder: Path) -> tuple[Path, dict[str, str]]:
    """Their tests where they find what they look for, and what they run under."""
    sources = sources_of("llama-cpp-python", VERSION) / "vendor" / "llama.cpp"
    tests = folder / "tools" / "server" / "tests"
    shutil.copytree(sources / "tools" / "server" / "tests", tests)
    shutil.copytree(sources / "models" / "templates", folder / "models" / "templates")
    stories = data_path("weights/stories260K")
    made = folder / "shim" / "test-model-stories260K"
    asked = ["convert", stories / "stories260K.bin", made, "--tokenizer", stories / "tok512.bin"]
    assert run([str(each) for each in asked]) == 0
    command = folder / "llama-server"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P "{SHIM / "llama_server.py"}" "$@"\n')
    command.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = {"LLAMA_SERVER_BIN_PATH": str(command), "SHIM_MODELS": str(made.parent), "PORT": str(port)}
    return tests, os.environ | more


def passed(tests: Path, environment: dict[str, str], names: list[str]) -> set[str]:
    """Those of these functions of which every case passed."""
    python = python_of("llama-tests", "-r", str(tests / "requirements.txt"))
    report = tests / "report.xml"
    files = sorted({f"unit/{name.partition('::')[0]}" for name in names})
    asked = [python, "-m", "pytest", "-q", "-m", "not slow", f"--junitxml={report}", *files]
    (tests / "log.txt").write_bytes(
        subprocess.run(asked, cwd=tests, env=environment, capture_output=True).stdout
    )
    good: dict[str, bool] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name', '').partition('[')[0]}"
        good[name] = good.get(name, True) and not len(case.findall("failure") + case.findall("error"))
    return {name for name in names if good.get(name)}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_their_tests_pass_or_have_a_reason(tmp_path: Path) -> None:
    tests, environment = prepare(tmp_path)
    names = list(functions(tests / "unit"))
    reasons = tomllib.loads((SHIM / "reasons.toml").read_text())
    told = {f"{file}.py::{name}" for file, some in reasons.items() for name in some}
    good = passed(tests, environment, names)
    assert sorted(set(names) - good - told) == []
    assert sorted(told & good) == [], "these pass, and need no reason any longer"
    assert sorted(told - set(names)) == []
    assert len(good) >= FLOOR


def test_the_shim_knows_flags_and_names_only() -> None:
    source = (SHIM / "llama_server.py").read_text()
    assert len(source.splitlines()) <= 200
    words = [
        n.value
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    assert not [word for word in words if "test_" in word or "Once" in word or "believe" in word]
