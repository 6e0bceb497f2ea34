"""What is asked of a server in operation, in this process or of its own."""

import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from tests.serve.conftest import House, settles
from tests.serve.test_guard import BODY
from tests.serve.test_worker import engine_of


def answer(
    house: House, path: str = "/v1/completions", body: Any = BODY, method: str = "POST", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    address = urlsplit(house.url)
    there = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    given = {"Content-Type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    there.request(method, path, json.dumps(body) if method == "POST" else None, given)
    response = there.getresponse()
    told = response.status, response.headers, response.read()
    there.close()
    return told


@contextmanager
def held(house: House) -> Iterator[None]:
    """While open, no step of the engine ends."""
    engine, gate = engine_of(house), threading.Event()
    whole = engine.reader.read

    def read(*args: Any, **named: Any) -> Any:
        gate.wait(60)
        return whole(*args, **named)

    engine.reader.read = read
    try:
        yield
    finally:
        gate.set()
        engine.reader.read = whole


@contextmanager
def asking(house: House, **how: Any) -> Iterator[list[Any]]:
    """A request that is asked beside what follows, and its answer behind it."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(answer(house, **how)))
    before = len(house.server.open)
    thread.start()
    settles(lambda: len(house.server.open) > before)
    yield found
    thread.join()


def house_gate(house: House) -> None:
    """Lets the steps go on that `held` holds."""
    engine_of(house).reader.read.__closure__[0].cell_contents.set()


@contextmanager
def command(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`headway serve ...` as a process of its own, and the address that it says."""
    asked = [sys.executable, "-m", "headway", "serve", *map(str, arguments), "--port", "0"]
    with subprocess.Popen(asked, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("listening: "):
                break
        try:
            yield process, "".join(said)
        finally:
            process.kill()


def api(said: str) -> str:
    """The address of the protocol, in what the command has said."""
    return said.splitlines()[-1].removeprefix("listening: ").partition(",")[0] + "/v1"
