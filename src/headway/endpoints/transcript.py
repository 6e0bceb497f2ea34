"""Endpoints and their replies; and a transcript of both, an append-only file from which a resumed run replays its
requests."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, TypeVar

from headway.errors import ConfigError, DataError, as_error
from headway.storage.appending import open_lines
from headway.text.chat import Message

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Reply:
    """A reply.

    text: verbatim.   finish_reason: as the endpoint reports it; "length" if `max_tokens` cut the text off.
    """

    text: str
    finish_reason: str


class Endpoint(Protocol):
    """Answers conversations. `name` identifies the endpoint, also in transcripts."""

    name: str

    def chat(self, messages: Sequence[Message], *, seed: int, temperature: float, max_tokens: int) -> Reply:
        """Returns the reply to [{"role": "user", "content": "..."}, ...], of at most `max_tokens` tokens; temperature 0
        is greedy. Raises HeadwayError if there is no reply."""


class Transcript:
    """A JSONL file of {"key", "request", "reply"}, one line per request, which is on disk before its reply is used.

    A request whose key is in the file is not sent: it has the reply of the file. An incomplete last line, left by a
    process that died, is cut off when the file is opened. It is a context manager; threads may call `chat`
    concurrently.

    Raises ConfigError if another process has the file open, DataError with file and line if it is not a transcript."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.sent, self._lock = 0, Lock()
        in_use = f"{path} is in use by another process; wait for it, or choose another file"
        self._file = open_lines(self.path, in_use)
        try:
            self._kept = self._read()
        except DataError:
            self._file.close()
            raise

    def chat(
        self,
        endpoint: Endpoint,
        key: str,
        messages: Sequence[Message],
        *,
        seed: int,
        temperature: float,
        max_tokens: int,
    ) -> Reply:
        """Returns the reply to a request, which is sent only if the file has no request with this key.

        Raises ConfigError if the file has a different request with this key, naming the differences; also what the
        endpoint raises."""
        settings = {"seed": seed, "temperature": temperature, "max_tokens": max_tokens}
        request = {"endpoint": endpoint.name, "messages": [dict(message) for message in messages], **settings}
        if key in self._kept:
            before, reply = self._kept[key]
            differing = [name for name, value in request.items() if before.get(name) != value]
            if differing:
                raise ConfigError(
                    f"{self.path}: the request {key!r} differs from the one in the file: "
                    f"{_differences(before, request, differing)}; use the earlier settings, or choose another output"
                )
            return reply
        reply = endpoint.chat(messages, seed=seed, temperature=temperature, max_tokens=max_tokens)
        line = json.dumps({"key": key, "request": request, "reply": asdict(reply)})
        with self._lock:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self.sent += 1
            self._kept[key] = (request, reply)
        return reply

    def _read(self) -> dict[str, tuple[Mapping[str, Any], Reply]]:
        entries: dict[str, tuple[Mapping[str, Any], Reply]] = {}
        for number, line in enumerate(self._file, 1):
            fault = f"{self.path}:{number}: not a line of a transcript"
            with as_error(DataError, fault, ValueError, KeyError, TypeError):
                value = json.loads(line)
                entries[value["key"]] = (value["request"], Reply(**value["reply"]))
        return entries

    def __enter__(self) -> "Transcript":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def in_order(function: Callable[[Job], Result], jobs: Iterable[Job], parallel: int) -> Iterator[Result]:
    """Yields the result of `function` for each job, in order, with `parallel` jobs at a time. An exception ends it, and
    jobs that have not started are dropped."""
    if parallel == 1:
        yield from map(function, jobs)
        return
    with ThreadPoolExecutor(parallel) as pool:
        yield from pool.map(function, jobs)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str]) -> str:
    short = [name for name in names if name != "messages"]
    parts = [f"{name} was {before.get(name)!r} and is {now[name]!r}" for name in short]
    return ", ".join([*parts, *(["its messages differ"] if "messages" in names else [])])
