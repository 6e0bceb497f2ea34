"""Patterns without a model: drawn, and what follows from them."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from headway.cache import pattern_facts
from headway.errors import ConfigError, PatternError
from headway.patterns import fates, parse
from headway.patterns.program import leaves
from headway.serve.server import Server
from headway.tokens import Tokens

MOST_LETTERS, MOST_LEAVES, MOST_HEADS = 500, 8, 16
"""Of a pattern: what is counted from it takes time that grows with the leaves of a head, threefold each."""
CELLS = " .+#"
"""Later, released, kept, seen: a letter for each of `FATES`."""


class Drawn(BaseModel):
    """`POST /v1/pattern`: `tokens` in the picture, some of them global, and layers of the receptive field."""

    model_config = ConfigDict(extra="forbid")
    pattern: str = Field(max_length=MOST_LETTERS)
    tokens: int = Field(32, ge=1, le=128)
    globals: list[int] = Field(default_factory=list, max_length=128)
    layers: int = Field(4, ge=1, le=32)


def routes(server: Server) -> APIRouter:
    """`/v1/pattern`."""
    router = APIRouter(prefix="/v1")

    @router.post("/pattern")
    def pattern(body: Drawn) -> dict[str, Any]:
        """What `headway show --json` says of a pattern, and its cells, head by head, a row for each query."""
        found = parse(body.pattern)
        if len(found.heads) > MOST_HEADS or any(len(leaves(head)) > MOST_LEAVES for head in found.heads):
            raise PatternError(f"pattern: at most {MOST_HEADS} heads of {MOST_LEAVES} parts are drawn here")
        if any(not 0 <= index < body.tokens for index in body.globals):
            raise ConfigError(f"globals: tokens are 0..{body.tokens - 1}, got {body.globals}")
        tokens = Tokens.range(body.tokens)
        tokens = tokens.with_global(body.globals) if body.globals else tokens
        cells = [
            ["".join(CELLS[c] for c in row) for row in head]
            for head in fates(found, tokens, tokens)[0].tolist()
        ]
        return {**pattern_facts(found, tokens, body.layers), "cells": cells}

    return router
