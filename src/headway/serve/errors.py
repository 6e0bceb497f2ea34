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


class Refused(HeadwayError):
    """What is not answered, and the status that tells it; `again`: seconds after which it may be otherwise."""

    def __init__(self, message: str, status: int, again: int = AGAIN) -> None:
        super().__init__(message)
        self.status, self.again = status, again


class Busy(Refused):
    """There is no room for another request now."""

    def __init__(self, message: str, again: int = AGAIN) -> None:
        super().__init__(message, 429, again)


class Unavailable(Refused):
    """What is asked for cannot be had now, and the request is not to blame."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 503)


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

    kinds: list[tuple[type[Exception], int, Callable[[Any], dict[str, Any]]]] = [
        (UnknownModel, 404, lambda error: {"message": str(error), "code": "model_not_found"}),
        (Busy, 429, lambda error: {"message": str(error)}),
        (PromptTooLong, 400, lambda error: {"message": str(error), "code": TOO_LONG, **error.told}),
        (Unavailable, 503, lambda error: {"message": str(error)}),
        (CacheError, 503, lambda error: {"message": str(error)}),
        (ConfigError, 400, lambda error: {"message": str(error)}),
        (DataError, 400, lambda error: {"message": str(error)}),
        (PatternError, 400, lambda error: {"message": str(error)}),
        (HeadwayError, 500, lambda error: {"message": str(error)}),
        (RequestValidationError, 400, of_fields),
        (ValidationError, 400, of_fields),
    ]
    for kind, status, read in kinds:
        app.add_exception_handler(kind, _teller(status, read))

    def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status, path = error.status_code, request.url.path
        told = shaped(status, str(error.detail), path=path)
        return Json(told, status_code=status, headers={**(error.headers or {}), **later(status, error)})

    app.add_exception_handler(HTTPException, of_http)


def _teller(status: int, read: Callable[[Any], dict[str, Any]]) -> Callable[[Request, Exception], Response]:
    return lambda request, error: Json(
        shaped(status, **read(error), path=request.url.path), status_code=status, headers=later(status, error)
    )


def later(status: int, error: Exception) -> dict[str, str]:
    """The header that says when to come again, where that may help."""
    return {"retry-after": str(getattr(error, "again", AGAIN))} if status in (429, 503) else {}
