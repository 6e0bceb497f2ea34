"""Endpoints with scripted replies: in this process, and behind a local HTTP server."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from headway.endpoints import Endpoint, Reply
from headway.text.chat import Message

Answer = tuple[int, dict[str, str], Any]  # status, headers, body


class Scripted(Endpoint):
    """An endpoint that replies with `answer(messages, seed)` and counts its requests in `asked`."""

    def __init__(
        self, answer: Callable[[Sequence[Message], int], str | Reply], name: str = "scripted"
    ) -> None:
        self.answer, self._name, self.asked = answer, name, 0

    @property
    def name(self) -> str:
        return self._name

    def chat(self, messages: Sequence[Message], *, seed: int, temperature: float, max_tokens: int) -> Reply:
        self.asked += 1
        reply = self.answer(messages, seed)
        return reply if isinstance(reply, Reply) else Reply(reply, "stop")


def completion(text: str | None, finish_reason: str = "stop") -> Answer:
    """Returns a chat completion as OpenAI's servers answer it."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    body = {"id": "1", "object": "chat.completion", "created": 0, "model": "small", "choices": [choice]}
    return 200, {}, body


def error(code: int, message: str, **headers: str) -> Answer:
    return code, headers, {"error": {"message": message, "type": "test"}}


@contextmanager
def server(answers: Callable[[str, Any], Answer]) -> Iterator[str]:
    """Yields the URL of a server that answers POST and GET requests by `answers(path, body)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer({**body, "authorization": self.headers.get("Authorization")})

        def do_GET(self) -> None:
            self._answer(None)

        def _answer(self, body: Any) -> None:
            code, headers, value = answers(self.path, body)
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(code)
            for name, text in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name.replace("_", "-"), text)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(BrokenPipeError):  # the client has stopped waiting
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http_server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http_server.server_port}/v1"
    finally:
        http_server.shutdown()
        http_server.server_close()
        thread.join()
