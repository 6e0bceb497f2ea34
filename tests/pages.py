"""Runs the commands and the Python of docs as a reader would, in toy size.

A command runs as printed, followed by the words of every row of SMALLER that matches it.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from headway.cli import main
from headway.hardware import gemm_peak
from headway.train.config_io import STAGES, read_yaml
from headway.train.microbatch_pool import DTYPES, choose_precision
from headway_lab.explain import TOPICS, settings_of
from tests.train.test_resume import in_a_child

ROOT = Path(__file__).parents[1]
AROUND = {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
STAGED = "|".join(
    sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml") if STAGES in read_yaml(path))
)
LONG = "|".join(topic for topic in TOPICS if "quick" in settings_of(topic))
# Replacements that a reader would make.
INSTEAD = (
    (r"^make demo$", "headway demo"),
    (r"^make bench$", "headway bench attention"),
    (r"/shared/", "shared/"),
    (r"steps=2000", "steps=2, depth=1, context=128, batch_tokens=512, vocab=280"),
    (r'(read_recipe\(.*"out=runs/gqa"\])', r"\1, small=True"),
    (r"--harness (?!endings)\S+", "--harness endings --tasks tasks"),
    (r"(URL|https?://[^\s#]+)#[\w.-]+", "ENDPOINT#small"),
)
STAGES_OR_PAIRS = rf"recipes/({STAGED}|translation)"
TINY = "--width 16 --heads 2 --vocab 280"
# A command gets the words of every row that matches it: the same run, but smaller. Of repeated options the last
# counts.
SMALLER = (
    (r"demo", "--quick --seconds 5"),
    (rf"train .*recipes/({STAGED})\.yaml", "--small"),
    (rf"train (?!.*(recipes/({STAGED}|small)\.yaml|run\.yaml|--resume|--epochs|--dry-run))", "--steps 2"),
    (r"train .*--resume auto --steps", "--steps 3"),
    (r"train .*--epochs 10", "--epochs 2"),
    (
        r"train (?!.*(--task|--model|--config|--family (bert|roformer)))",
        "--depth 2 --width 32 --heads 8 --kv-heads 8 --vocab 280",
    ),
    (r"train .*recipes/small", f"--depth 2 --kv-heads 2 --sample-tokens 8 {TINY}"),
    (r"train .*(recipes/roformer-mlm|--family (bert|roformer))", f"--depth 1 {TINY}"),
    (r"train .*recipes/translation", f"--layers 1 --hidden 32 {TINY}"),
    (rf"train (?!.*({STAGES_OR_PAIRS}|--task)).*(--data |data=)", "--context 128 --batch-tokens 512"),
    (r"eval .*--data", "--limit 500"),
    (rf"explain ({LONG})\b", "--quick"),
    (r"instruct", "--count 3"),
    (r"bench attention", "--case causal --tokens 64 --repeats 1"),
    (r"bench growth", "--tokens 64 --window 16"),
    (r"bench (decode|prefill)", "--model tiny --rows 1 --context 16"),
    (r"bench serve", "--model tiny --weights bf16 --clients 1 --rounds 1 --new 2"),
    (r"bench train", "--case tiny-2x64 --no-compiled --no-memory"),
    (r"diff .*--ladder", "--steps 1"),
)


WRITTEN = {"convert": 3, "surgery": 4, "data": 2}  # index of the word that a command writes to
BUILD = "tests/native/test_build.py"
SANITIZED = ("compiles for minutes", f"{BUILD}::test_a_sanitized_library_stops_at_a_read_outside_its_memory")
BOOK = (
    "every topic, for minutes",
    "tests/book/test_book.py::test_a_book_has_its_chapters_and_fetches_nothing",
)
SERVED = (
    "answers until it is ended",
    "tests/serve/test_command.py::test_the_command_loads_says_drains_and_logs",
)
INSTALLED = (
    "fetches from the index",
    "tests/test_release.py::test_an_installed_wheel_runs_without_a_compiler",
)
# Commands that are shown but not run here: why, and the test that runs them.
NOT_RUN = {
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": INSTALLED,
    'pip install "headway[lab,serve]"': INSTALLED,
    "make test": ("this is what it runs", "tests/test_readme.py::test_the_section_runs"),
    "headway explain all --out book": BOOK,
    "headway serve runs/demo": SERVED,
    "headway serve models/llama-3 --alias llama=models/llama-3 --keys keys.txt --host 0.0.0.0": SERVED,
    "vllm-router --host 127.0.0.1 --port 8000 --policy cache_aware --worker-urls http://10.0.0.1:8080 "
    "http://10.0.0.2:8080": (
        "needs two machines",
        "tests/serve/test_routing.py::test_texts_are_the_same_and_what_begins_alike_meets_its_prefix",
    ),
    "headway explain all --out FOLDER --threads 1": BOOK,
    "sbatch --nodes 2 recipes/slurm.sh --config recipes/small.yaml data=/shared/text out=/shared/runs/mine": (
        "a cluster", "tests/train/test_launch.py::test_processes_are_started_and_train_as_one"
    ),
    "python recipes/ray_serve.py 2 8000 models/llama-3": (
        "Ray Serve", "tests/serve/test_routing.py::test_replicas_of_ray_serve_keep_their_sessions"
    ),
    "python -m headway.native.build": (
        "renews the libraries that these tests use", f"{BUILD}::test_what_is_up_to_date_is_left_alone"
    ),
    "python -m headway.native.build --level avx2 --force": (
        "renews the libraries that these tests use", f"{BUILD}::test_every_level_carries_the_hash_of_its_sources"
    ),
    "CXX=aarch64-linux-gnu-g++ python -m headway.native.build --machine aarch64 --out lib-aarch64": (
        "needs a compiler of another machine; `make test-arm` runs it",
        "tests/native/arm/test_driver.py::test_what_is_missing_is_named",
    ),
    "python -m headway.native.build --sanitize --level avx2": SANITIZED,
    "LD_PRELOAD=$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 "
    "HEADWAY_NATIVE_DIR=src/headway/native/lib/sanitized HEADWAY_NATIVE=avx2 python -m pytest -s -k avx2 tests/native "
    "tests/models/test_decode_step.py tests/nn/test_quantized.py": SANITIZED,
}  # fmt: skip


class Block(NamedTuple):
    """A fenced code block, and its place."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return (
            f"{self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page.name}:{self.line}"
        )


def blocks_of(page: Path) -> list[Block]:
    """Returns the code blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, *match.groups()) for match in BLOCK.finditer(text)
    ]


def commands_of(language: str, text: str) -> list[str]:
    """Returns the commands of a shell block, or those after `$` in a console block, without comments."""
    lines = re.sub(r" *\\\n *", " ", text).splitlines()
    typed = {"sh": lines, "console": [line[2:] for line in lines if line.startswith("$ ")]}
    bare = [re.sub(r"(^|\s)#( .*|$)", "", line).strip() for line in typed.get(language, ())]
    return [line for line in bare if line]


def smaller(command: str) -> str:
    """Returns the command in toy size."""
    for pattern, words in INSTEAD:
        command = re.sub(pattern, words, command)
    words = [words for pattern, words in SMALLER if re.search(rf"\bheadway {pattern}", command)]
    return " ".join([command, *words])


def names_of(command: str) -> Iterator[str]:
    """Yields the names that a command may read: those of its words, except where it writes."""
    words = shlex.split(command)
    for number, word in enumerate(words):
        keys = (words[number - 1].strip("-"), word.partition("=")[0])
        if "out" not in keys and WRITTEN.get(words[1]) != number:
            yield from names_in(word)


def names_in(word: str) -> Iterator[str]:
    """Yields the names in a word: itself or the value of a setting, and those in a recipe."""
    yield word.rpartition("=")[2].rstrip("/")
    if re.fullmatch(r"recipes/[\w-]+\.yaml", word):
        yield "recipes"
        yield from (text.rstrip("/") for text in _strings(read_yaml(ROOT / word)))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        parts = [item for key, item in value.items() if key != "out"] if isinstance(value, dict) else value
        for item in parts:
            yield from _strings(item)


def type_in(command: str, folder: Path) -> str:
    """Runs a command in `folder` and returns what it prints. Raises AssertionError if it fails.

    `headway ...` without shell syntax runs in a fork of this process, which has the slow imports done."""
    if command.startswith("headway ") and not re.search(
        r"[|<>&;$]", re.sub(r"'[^']*'|\"[^\"]*\"", "", command)
    ):
        return in_folder(folder, main, command)
    environment = {
        **os.environ,
        **AROUND,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    shell = ["bash", "-o", "pipefail", "-c", command]
    process = subprocess.run(
        shell, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert process.returncode == 0, f"{command}\n{process.stdout}\n{process.stderr}"
    return process.stdout + process.stderr


@cache
def ready() -> None:
    """Does once what costs each training command seconds: slow imports, and measuring the peak of products."""
    for module in ("headway.train.run", "torch._dynamo", "matplotlib.figure"):
        import_module(module)
    gemm_peak(DTYPES[choose_precision("auto").what])


def in_folder(folder: Path, act: Callable[[], None], what: str) -> str:
    """Runs `act` in a fork of this process in `folder`, with the words of `what` as `sys.argv`, and returns what it
    prints. Raises AssertionError if it fails."""

    def child() -> None:
        os.chdir(folder)
        os.environ.update(AROUND)
        for number, target in enumerate((os.open(os.devnull, os.O_RDONLY), out.fileno(), out.fileno())):
            os.dup2(target, number)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        sys.argv = shlex.split(what)
        warnings.resetwarnings()
        try:
            act()
        except SystemExit as end:
            if end.code:
                raise
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()

    ready()
    with tempfile.TemporaryFile("w+b") as out:
        code = in_a_child(child)
        out.seek(0)
        output = out.read().decode()
    assert code == 0, f"{what}\n{output}"
    return output


ROUNDING = re.compile(r"\d\.\d+e-\d+")
"""Numbers that are rounding errors, which differ between processors."""


def assert_printed(shown: str, printed: str) -> None:
    """Asserts that every shown line is printed, in order; a shown line may be the beginning of a printed one."""
    lines = iter(printed.splitlines())
    for expected in (line.rstrip() for line in shown.splitlines() if line.strip() not in ("", "...")):
        assert any(begins(line, expected) for line in lines), (
            f"not printed, or not in this order: {expected!r}"
        )


def begins(line: str, expected: str) -> bool:
    """Returns whether a line begins as expected; rounding errors may differ by a factor of 3."""
    match = re.match(r"(\d\.\d+e-\d+)".join(map(re.escape, ROUNDING.split(expected))), line)
    numbers = (
        zip(map(float, match.groups()), map(float, ROUNDING.findall(expected)), strict=True) if match else ()
    )
    return match is not None and all(1 / 3 <= number / shown <= 3 for number, shown in numbers)
