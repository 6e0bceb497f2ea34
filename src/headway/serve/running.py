"""The listening server: sockets, limits on request headers, signals, and the log."""

import asyncio
import logging
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.serve.guard import MOST_HEAD, PATIENCE
from headway.serve.server import Server

TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Heads(HttpToolsProtocol):
    """An HTTP protocol that limits the headers of a request while they arrive, in bytes and in seconds."""

    _bytes, _deadline = 0, None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before or not (self.cycle is None or self.cycle.response_complete):
            self._forget()
            return
        self._bytes += len(data)
        self._expect()
        if self._bytes > MOST_HEAD and not self.transport.is_closing():
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _expect(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(PATIENCE, self.transport.abort)

    def _forget(self) -> None:
        self._bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Listener(uvicorn.Server):
    """Serves until a signal arrives; then it refuses new requests and finishes those that are running, for at most
    `patience` seconds. A second signal ends it at once.

    say: is called with the server's URL once it listens.   settings: arguments of `uvicorn.Config`, such as host, port,
        ssl_certfile, ssl_keyfile.
    """

    def __init__(
        self,
        server: Server,
        app: Any,
        *,
        patience: float = 30.0,
        say: Callable[[str], None] = lambda url: None,
        **settings: Any,
    ) -> None:
        http: Any = Heads
        quiet: dict[str, Any] = {"log_level": "error", "log_config": None, "server_header": False}
        settings |= {"ws": "none", "proxy_headers": False, "timeout_graceful_shutdown": 1}
        super().__init__(uvicorn.Config(app, http=http, **quiet, **settings))
        self.server, self.patience, self.say = server, patience, say
        self._until = 0.0

    @property
    def url(self) -> str:
        """The URL of the server."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"{'https' if self.config.is_ssl else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:  # not if the address is in use
            self.say(self.url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self.drain()

    def drain(self) -> None:
        """Stops accepting requests, and shuts down when the running ones are finished."""
        self._until, self.server.ending = time.monotonic() + self.patience, True

    async def on_tick(self, counter: int) -> bool:
        ended = self.server.ending and (not self.server.open or time.monotonic() > self._until)
        self.should_exit = self.should_exit or ended
        return await super().on_tick(counter)


class Lines(logging.Formatter):
    """A log formatter that writes JSON lines. Exceptions are reported by type and location: their messages may quote
    clients."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname}
        line |= {"message": record.getMessage(), **getattr(record, "told", {})}
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            line["at"] = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(record.exc_info[2])]
        return orjson.dumps(line).decode()


def log_to(path: Path | None) -> None:
    """Logs to a file, or if `path` is None only warnings and errors to stderr."""
    handler = logging.StreamHandler() if path is None else logging.FileHandler(path)
    handler.setFormatter(Lines())
    handler.setLevel(logging.WARNING if path is None else logging.INFO)
    for name in ("headway.serve", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO if name == "headway.serve" else logging.WARNING)
