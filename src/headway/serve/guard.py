"""Checks of a request before any route handles it: host, key, content type and size; and the record of it as a
`Visit`."""

import asyncio
import hmac
import re
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.serve.errors import Refused, failed
from headway.serve.server import Server
from headway.serve.visits import VISIT, Key, Visit

PUBLIC = ("/", "/health", "/ready", "/v1/models")
PUBLIC_BELOW = ("/page/", "/v1/models/")
"""Paths that need no key, and prefixes of such paths."""
ENDING = ("/health", "/metrics")
"""Paths that are still answered while the server shuts down."""
MOST_BYTES, MOST_HEAD = 8 << 20, 1 << 16
"""Maximum size in bytes of a body, and of all headers."""
MOST_MARKS = {b",": 1 << 18, b"[": 1 << 16, b"{": 1 << 16}
"""Maximum number of each character in a body. They bound the memory of parsing it, and its time, during which the event
loop answers nobody else."""
PATIENCE = 30.0
"""Seconds within which a body must arrive."""
SAFE_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
"""Request ids that are accepted from clients; they appear in logs."""


class Guard:
    """ASGI middleware that checks requests before the application sees them.

    server: the application's server, which counts the visits.
    hosts: host names that requests may use (`Host`); None allows any. This stops DNS rebinding: a page elsewhere whose
        name resolves to this machine sends a name that is not listed.
    keys: one of these must be given (`Authorization: Bearer`, `X-Api-Key`), unless the list is empty.
    """

    def __init__(
        self, app: ASGIApp, *, server: Server, hosts: Collection[str] | None = None, keys: Sequence[Key] = ()
    ) -> None:
        self.app, self.server, self.hosts, self.keys = app, server, hosts, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        visit = Visit(scope["method"])
        if SAFE_ID.fullmatch(name := Headers(scope=scope).get("x-request-id", "")):
            visit.id = name

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", visit.id.encode())]
            await send(message)

        self.server.open.add(visit)
        token = VISIT.set(visit)
        try:
            await self._answer(visit, scope, receive, tell)
        except Exception as error:
            if visit.status:  # the response has begun, so its status cannot change
                raise
            await failed(error, visit.id, scope["path"])(scope, receive, tell)
        finally:
            VISIT.reset(token)
            self.server.open.remove(visit)
            visit.route = getattr(scope.get("route"), "path", visit.route)
            visit.end()
            self.server.count(visit)

    async def _answer(self, visit: Visit, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        self._check(headers)
        if key := self._key(scope["path"], headers):
            visit.key = key
            visit.after.enter_context(key.asking())
        if self.server.ending and scope["path"] not in ENDING:
            raise Refused("the server is shutting down; use another one", 503)
        read = []
        if scope["method"] in ("POST", "PUT", "PATCH"):
            try:
                async with asyncio.timeout(PATIENCE):
                    body = await self._body(Request(scope, receive))
            except TimeoutError:
                raise Refused(f"the body did not arrive within {PATIENCE:g} s", 408) from None
            read = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return read.pop() if read else await receive()

        await self.app(scope, again, send)

    def _check(self, headers: Headers) -> None:
        if sum(len(name) + len(value) for name, value in headers.raw) > MOST_HEAD:
            raise Refused(f"the headers exceed {MOST_HEAD} bytes; send less", 431)
        name = headers.get("host", "")
        host = name[: name.rfind("]") + 1] if name.startswith("[") else name.partition(":")[0]
        if self.hosts is not None and host not in self.hosts:
            raise Refused(f"Host {name!r} is not allowed; allowed: {', '.join(sorted(self.hosts))}", 403)

    def _key(self, path: str, headers: Headers) -> Key | None:
        """Returns the key of a request, or None if none is needed. Raises Refused if the key is missing or wrong."""
        if not self.keys or path in PUBLIC or path.startswith(PUBLIC_BELOW):
            return None
        bearer = headers.get("authorization", "").removeprefix("Bearer ").strip()
        secret = (bearer or headers.get("x-api-key", "")).encode("latin-1")
        # compares with all keys, so that the time does not reveal which one matches
        fitting = [key for key in self.keys if hmac.compare_digest(secret, key.secret.encode())]
        if not fitting:
            raise Refused("missing or wrong API key; send Authorization: Bearer KEY, or X-Api-Key: KEY", 401)
        return fitting[0]

    async def _body(self, request: Request) -> bytes:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise Refused(f"content-type must be application/json, got {content_type or 'none'}", 400)
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    raise Refused(f"the body exceeds {MOST_BYTES} bytes; send less", 413)
        except ClientDisconnect:
            raise Refused("the client disconnected", 499) from None
        for mark, most in MOST_MARKS.items():
            if body.count(mark) > most:
                raise Refused(f"the body has more than {most} of {mark.decode()!r}; send less", 413)
        return bytes(body)
