"""How what fails is told: in OpenAI's shape, or in Anthropic's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from headway.errors import CacheError, ConfigError, DataError, HeadwayError, PatternError

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
TOO_LONG = "context_length_exceeded"
ANTHROPIC = {name: KINDS[name] for name in (401, 404, 429)}
ANTHROPIC |= {403: "permission_error", 413: "request_too_large", 503: "overloaded_error"}
AGAIN = 1
"""Seconds after which a client that was refused for lack of room may ask again."""


class UnknownModel(ConfigError):
    """A name that no model of the server has."""


class PromptTooLong(ConfigError):
    """A prompt that leaves no room for an answer."""

    def __init__(self, tokens: int, context: int) -> None:
        super().__init__(
            f"a prompt of {tokens} tokens exceeds the available context size ({context} tokens); shorten it"
        )
        self.told = {"type": "exceed_context_size_error", "n_prompt_tokens": tokens, "n_ctx": context}


class Busy(HeadwayError):
    """There is no room for another request now."""


class Unavailable(HeadwayError):
    """What is asked for cannot be had now, and the request is not to blame."""


class Json(JSONResponse):
    """An answer of JSON."""

    def render(self, content: Any) -> bytes:
        return encoded(content)


def encoded(content: Any) -> bytes:
    """As JSON; integers of any size, which `orjson` does not know, too."""
    try:
        return orjson.dumps(content)
    except TypeError:
        return json.dumps(content).encode()


def shaped(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    *,
    path: str = "",
    **more: Any,
) -> dict[str, Any]:
    """What failed, as OpenAI's clients read it; as Anthropic's do on the paths of its protocol."""
    if path.startswith("/v1/messages"):
        kind = ANTHROPIC.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **more}}


def warned(warnings: Sequence[str]) -> dict[str, Any]:
    """The field of an answer that tells warnings, where there are any."""
    return {"warnings": [*warnings]} if warnings else {}


def tell_errors(app: FastAPI) -> None:
    """Has an application answer what fails in that shape."""

    def of_fields(error: RequestValidationError | ValidationError) -> dict[str, Any]:
        first = max(error.errors(), key=lambda one: len(one["loc"]))  # of a union, what came closest
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return {"message": f"{where}: {first['msg']}" if where else first["msg"], "param": where or None}

    kinds: list[tuple[type[Exception], int, Callable[[Any], dict[str, Any]], dict[str, str]]] = [
        (UnknownModel, 404, lambda error: {"message": str(error), "code": "model_not_found"}, {}),
        (Busy, 429, lambda error: {"message": str(error)}, {"retry-after": str(AGAIN)}),
        (PromptTooLong, 400, lambda error: {"message": str(error), "code": TOO_LONG, **error.told}, {}),
        (Unavailable, 503, lambda error: {"message": str(error)}, {"retry-after": str(AGAIN)}),
        (CacheError, 503, lambda error: {"message": str(error)}, {"retry-after": str(AGAIN)}),
        (ConfigError, 400, lambda error: {"message": str(error)}, {}),
        (DataError, 400, lambda error: {"message": str(error)}, {}),
        (PatternError, 400, lambda error: {"message": str(error)}, {}),
        (HeadwayError, 500, lambda error: {"message": str(error)}, {}),
        (RequestValidationError, 400, of_fields, {}),
        (ValidationError, 400, of_fields, {}),
        (Exception, 500, lambda error: {"message": "the server failed; see its log"}, {}),
    ]
    for kind, status, read, headers in kinds:
        app.add_exception_handler(kind, _teller(status, read, headers))

    def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = shaped(error.status_code, str(error.detail), path=request.url.path)
        return Json(told, status_code=error.status_code, headers=error.headers)

    app.add_exception_handler(HTTPException, of_http)


def _teller(
    status: int, read: Callable[[Any], dict[str, Any]], headers: dict[str, str]
) -> Callable[[Request, Exception], Response]:
    def tell(request: Request, error: Exception) -> Response:
        told = shaped(status, **read(error), path=request.url.path)
        return Json(told, status_code=status, headers=headers)

    return tell
