"""The web page: static files, which send requests to this server only; and patterns without a model, for it to draw."""

from importlib.resources import files
from pathlib import PurePath
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel, Field

from headway.cache import pattern_facts
from headway.errors import ConfigError, PatternError
from headway.patterns import fates, parse
from headway.patterns.program import leaves
from headway.serve.errors import Refused
from headway.serve.server import Server
from headway.tokens import Tokens

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
MOST_LETTERS, MOST_LEAVES, MOST_HEADS = 500, 8, 16
"""Bounds of a pattern. The time to count its facts triples with each leaf of a head."""
CELLS = " .+#"
"""The characters of later, released, kept and seen keys, in the order of `FATES`."""


class Drawn(BaseModel, extra="forbid"):
    """`POST /v1/pattern`: a pattern, the number of tokens in the picture, global tokens, and layers of the receptive
    field."""

    pattern: str = Field(max_length=MOST_LETTERS)
    tokens: int = Field(32, ge=1, le=128)
    globals: list[int] = Field(default_factory=list, max_length=128)
    layers: int = Field(4, ge=1, le=32)


def routes(server: Server) -> APIRouter:
    """Returns the routes `/` and `/page/NAME`."""
    router = APIRouter(include_in_schema=False)
    paths = (path for path in (files("headway.serve") / "page").iterdir() if path.is_file())
    content = {path.name: path.read_bytes() for path in paths}

    @router.get("/")
    @router.get("/page/{name}")
    def page(name: str = "index.html") -> Response:
        """Returns one of the page's files."""
        if name not in content:
            raise Refused(f"the page has no file {name!r}", 404)
        return Response(content[name], media_type=KINDS[PurePath(name).suffix], headers=HEADERS)

    return router


def patterns(server: Server) -> APIRouter:
    """Returns the route `/v1/pattern`."""
    router = APIRouter(prefix="/v1")

    @router.post("/pattern")
    def pattern(body: Drawn) -> dict[str, Any]:
        """Returns what `headway show --json` reports of a pattern, and its cells: for each head, a row per query."""
        parsed = parse(body.pattern)
        if len(parsed.heads) > MOST_HEADS or any(len(leaves(head)) > MOST_LEAVES for head in parsed.heads):
            raise PatternError(
                f"pattern: too large to draw; give at most {MOST_HEADS} heads of {MOST_LEAVES} parts each"
            )
        if any(not 0 <= index < body.tokens for index in body.globals):
            raise ConfigError(f"globals must be tokens in 0..{body.tokens - 1}, got {body.globals}")
        tokens = Tokens.range(body.tokens)
        tokens = tokens.with_global(body.globals) if body.globals else tokens
        heads = fates(parsed, tokens, tokens)[0].tolist()
        cells = [["".join(CELLS[c] for c in row) for row in head] for head in heads]
        return {**pattern_facts(parsed, tokens, body.layers), "cells": cells}

    return router
