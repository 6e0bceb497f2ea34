"""Helpers to query a server in operation, in this process or in one of its own."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.serve.conftest import House, answer, settles
from tests.serve.test_worker import engine_of


@contextmanager
def held(house: House) -> Iterator[None]:
    """Blocks the engine: no step ends while the context is open."""
    engine, gate = engine_of(house), threading.Event()
    original = engine.reader.read

    def read(*args: Any, **kwargs: Any) -> Any:
        gate.wait(60)
        return original(*args, **kwargs)

    engine.reader.read = read
    try:
        yield
    finally:
        gate.set()
        engine.reader.read = original


@contextmanager
def asking(house: House, **request: Any) -> Iterator[list[Any]]:
    """Yields the list that gets the answer to a request, which is sent before and answered after the block."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(answer(house, **request)))
    before = len(house.server.open)
    thread.start()
    settles(lambda: len(house.server.open) > before)
    yield answers
    thread.join()


def house_gate(house: House) -> None:
    """Lets the steps go on that `held` blocks."""
    engine_of(house).reader.read.__closure__[0].cell_contents.set()


@contextmanager
def command(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs `headway serve ...` in a process of its own; yields the process and the lines up to its address."""
    command_line = [sys.executable, "-m", "headway", "serve", *map(str, arguments), "--port", "0"]
    with subprocess.Popen(command_line, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("listening: "):
                break
        try:
            yield process, "".join(lines)
        finally:
            process.kill()


def api(printed: str) -> str:
    """Returns the base URL of the API from the lines that the command has printed."""
    return printed.splitlines()[-1].removeprefix("listening: ").partition(",")[0] + "/v1"
