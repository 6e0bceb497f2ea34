"""What a request must be before anything reads it: of this host, with a key, of JSON, and not too large; and what is
kept of it: who asked, what came of it, and that it has ended."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Collection, MutableMapping, Sequence
from typing import Any

import orjson

from headway.serve.errors import Refused, later, shaped
from headway.serve.server import Server
from headway.serve.visits import VISIT, Key, Visit

LOG = logging.getLogger(__name__)
Scope = MutableMapping[str, Any]
PUBLIC = ("/", "/health", "/ready", "/v1/models")
PUBLIC_BELOW = ("/page/", "/v1/models/")
"""Paths that need no key, and those below which none does."""
ENDING = ("/health", "/metrics")
"""Paths that are answered to the end."""
MOST_BYTES, MOST_HEAD = 8 << 20, 1 << 16
"""Of a body, and of a head."""
MOST_MARKS = {b",": 1 << 18, b"[": 1 << 16, b"{": 1 << 16}
"""Of a body: they bound the time in which it is read, while nobody else is answered, and what it takes in memory."""
PATIENCE = 30.0
"""Seconds in which a body has to come."""


class Guard:
    """Stands before an application.

    server: that of the application, whose visits they are.
    hosts: names by which the server may be asked (`Host`); None is any. A page elsewhere whose name resolves to this
        machine is none of them (DNS rebinding).
    keys: one of which a request must give (`Authorization: Bearer`, `X-Api-Key`); none is needed where there are none.
    most_bytes: of a body.
    """

    def __init__(
        self,
        app: Callable[..., Any],
        *,
        server: Server,
        hosts: Collection[str] | None = None,
        keys: Sequence[Key] = (),
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.app, self.server, self.hosts, self.most_bytes = app, server, hosts, most_bytes
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        visit = Visit(Visit.id_of(headers.get(b"x-request-id", b"")), scope["method"])

        async def tell(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", visit.id.encode())]
            await send(message)

        with self.server.visited(visit, scope):
            token = VISIT.set(visit)
            try:
                await self._answer(visit, scope, headers, receive, tell)
            except Exception as error:
                if visit.status:  # what has begun cannot be said otherwise
                    raise
                status, why = getattr(error, "status", 500), str(error)
                if status == 500:
                    LOG.exception("%s failed", visit.id)
                    why = f"the server failed; its log has more of {visit.id}"
                content = orjson.dumps(shaped(status, why, path=scope["path"]))
                more = {"content-type": "application/json", "content-length": str(len(content))}
                head = [(k.encode(), v.encode()) for k, v in {**more, **later(status, error)}.items()]
                await tell({"type": "http.response.start", "status": status, "headers": head})
                await tell({"type": "http.response.body", "body": content})
            finally:
                VISIT.reset(token)

    async def _answer(
        self,
        visit: Visit,
        scope: Scope,
        headers: dict[bytes, bytes],
        receive: Callable[..., Any],
        send: Callable[..., Any],
    ) -> None:
        self._check(scope, headers)
        if key := self._key(scope["path"], headers):
            visit.key = key
            visit.after.callback(key.enter())
        if self.server.ending and scope["path"] not in ENDING:
            raise Refused("the server ends; ask another one", 503)
        given = []
        if scope["method"] in ("POST", "PUT", "PATCH"):
            try:
                async with asyncio.timeout(PATIENCE):
                    body = await self._body(headers, receive)
            except TimeoutError:
                raise Refused(f"the body did not come within {PATIENCE:g} s", 408) from None
            given = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            return given.pop() if given else await receive()

        await self.app(scope, again, send)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEAD:
            raise Refused(f"the headers have more than {MOST_HEAD} bytes; send less", 431)
        name = headers.get(b"host", b"").decode("latin-1")
        host = name[: name.rfind("]") + 1] if name.startswith("[") else name.partition(":")[0]
        if self.hosts is not None and host not in self.hosts:
            raise Refused(f"Host {name!r} is not this server's; it is {', '.join(sorted(self.hosts))}", 403)

    def _key(self, path: str, headers: dict[bytes, bytes]) -> Key | None:
        """The key of a request; None where none is needed."""
        if not self.keys or path in PUBLIC or path.startswith(PUBLIC_BELOW):
            return None
        bearer = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
        given = bearer or headers.get(b"x-api-key", b"")
        fitting = [
            key for key in self.keys if hmac.compare_digest(given, key.secret.encode())
        ]  # all are compared
        if not fitting:
            raise Refused("a key is needed: Authorization: Bearer KEY, or X-Api-Key", 401)
        return fitting[0]

    async def _body(self, headers: dict[bytes, bytes], receive: Callable[..., Any]) -> bytes:
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise Refused(
                f"bodies are application/json, got {kind.decode('latin-1') or 'no content-type'}", 400
            )
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused("the client has left", 499)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.most_bytes:
                raise Refused(f"the body has more than {self.most_bytes} bytes; send less", 413)
            if not message.get("more_body"):
                break
        body = b"".join(parts)
        for mark, most in MOST_MARKS.items():
            if body.count(mark) > most:
                raise Refused(f"the body has {mark.decode()} more than {most} times; send less", 413)
        return body
