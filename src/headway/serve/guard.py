"""What a request must be before anything reads it: of this host, with a key, of JSON, and not too large."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, MutableMapping, Sequence
from typing import Any

import orjson

from headway.serve.errors import shaped

Scope = MutableMapping[str, Any]
PUBLIC = ("/", "/health", "/ready", "/v1/models")
PUBLIC_BELOW = ("/page/", "/v1/models/")
"""Paths that need no key, and those below which none does."""
MOST_BYTES = 8 << 20


class Refused(Exception):
    """Why, and the status that tells it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Guard:
    """Stands before an application.

    hosts: names by which the server may be asked (`Host`); None is any. A page elsewhere whose name resolves to this
        machine is none of them (DNS rebinding).
    keys: one of which a request must give (`Authorization: Bearer`, `X-Api-Key`); none is needed where there are none.
    most_bytes: of a body.
    """

    def __init__(
        self,
        app: Callable[..., Any],
        *,
        hosts: Collection[str] | None = None,
        keys: Sequence[str] = (),
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.app, self.hosts, self.most_bytes = app, hosts, most_bytes
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            headers = {name.lower(): value for name, value in scope["headers"]}
            self._check(scope, headers)
            body = await self._body(headers, receive) if scope["method"] in ("POST", "PUT", "PATCH") else None
        except Refused as why:
            content = orjson.dumps(shaped(why.status, str(why), path=scope["path"]))
            head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
            await send({"type": "http.response.start", "status": why.status, "headers": head})
            await send({"type": "http.response.body", "body": content})
            return
        given = [] if body is None else [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            return given.pop() if given else await receive()

        await self.app(scope, again, send)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        name = headers.get(b"host", b"").decode("latin-1")
        host = name[: name.rfind("]") + 1] if name.startswith("[") else name.partition(":")[0]
        if self.hosts is not None and host not in self.hosts:
            raise Refused(403, f"Host {name!r} is not this server's; it is {', '.join(sorted(self.hosts))}")
        path = scope["path"]
        if not self.keys or path in PUBLIC or path.startswith(PUBLIC_BELOW):
            return
        bearer = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
        given = bearer or headers.get(b"x-api-key", b"")
        if not sum(hmac.compare_digest(given, key) for key in self.keys):  # all of them, whichever fits
            raise Refused(401, "a key is needed: Authorization: Bearer KEY, or X-Api-Key")

    async def _body(self, headers: dict[bytes, bytes], receive: Callable[..., Any]) -> bytes:
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise Refused(
                400, f"bodies are application/json, got {kind.decode('latin-1') or 'no content-type'}"
            )
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(499, "the client has left")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.most_bytes:
                raise Refused(413, f"the body has more than {self.most_bytes} bytes; send less")
            if not message.get("more_body"):
                return b"".join(parts)
