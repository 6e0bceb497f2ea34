"""The page: static files that ask this server, and nothing else, for all that they show."""

from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter
from fastapi.responses import Response

from headway.serve.errors import Refused
from headway.serve.server import Server

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def routes(server: Server) -> APIRouter:
    """`/`, and `/page/NAME` for what it consists of."""
    router = APIRouter(include_in_schema=False)
    found = (path for path in (files("headway.serve") / "page").iterdir() if path.is_file())
    content = {path.name: path.read_bytes() for path in found}

    @router.get("/")
    @router.get("/page/{name}")
    def page(name: str = "index.html") -> Response:
        """One of the files."""
        if name not in content:
            raise Refused(f"the page has no file {name!r}", 404)
        return Response(content[name], media_type=KINDS[PurePath(name).suffix], headers=HEADERS)

    return router
