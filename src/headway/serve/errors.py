"""Error responses, in OpenAI's format or Anthropic's."""

import json
import logging
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from headway.errors import CacheError, ConfigError, DataError, HeadwayError, PatternError

LOG = logging.getLogger(__name__)
KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
ANTHROPIC = {name: KINDS[name] for name in (401, 404, 429)}
ANTHROPIC |= {403: "permission_error", 413: "request_too_large", 503: "overloaded_error"}
AGAIN = 1
"""Default `Retry-After` in seconds, for clients that were refused for lack of capacity."""


class UnknownModel(ConfigError):
    """Raised for a name that no model of the server has."""

    status, told = 404, {"code": "model_not_found"}


class PromptTooLong(ConfigError):
    """Raised for a prompt that is longer than the context."""

    def __init__(self, tokens: int, context: int) -> None:
        super().__init__(
            f"a prompt of {tokens} tokens exceeds the available context size ({context} tokens); shorten it"
        )
        self.told = {"type": "exceed_context_size_error", "n_prompt_tokens": tokens, "n_ctx": context}
        self.told["code"] = "context_length_exceeded"


class Refused(HeadwayError):
    """A request that is refused, with the status of the response; `again`: seconds after which the client may retry."""

    status = 400

    def __init__(self, message: str, status: int | None = None, again: int = AGAIN) -> None:
        super().__init__(message)
        self.status, self.again = status or self.status, again


class Busy(Refused):
    """Raised if there is no capacity for another request now."""

    status = 429


class Unavailable(Refused):
    """Raised if a request cannot be served now, through no fault of its own."""

    status = 503


class Json(JSONResponse):
    """A JSON response."""

    def render(self, content: Any) -> bytes:
        return encoded(content)


def encoded(content: Any) -> bytes:
    """Returns content as JSON; `json` takes over for what `orjson` cannot encode, e.g. integers beyond 64 bits."""
    try:
        return orjson.dumps(content)
    except TypeError:
        return json.dumps(content).encode()


def shaped(status: int, message: str, *, path: str = "", **more: Any) -> dict[str, Any]:
    """Returns the body that reports a failure, in OpenAI's format, or in Anthropic's on the paths of its protocol.
    `more`: other fields of an OpenAI error (`param`, `code`, ...)."""
    if path.startswith("/v1/messages"):
        kind = ANTHROPIC.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None, **more}}


def warned(warnings: Sequence[str]) -> dict[str, Any]:
    """Returns the response field with warnings, or nothing if there are none."""
    return {"warnings": [*warnings]} if warnings else {}


def explained(error: Exception, request: str) -> tuple[int, dict[str, Any]]:
    """Returns the status of an exception and the fields of its response, as `shaped` takes them. Unexpected exceptions
    are logged under the request's id."""
    fields = {"message": str(error), **getattr(error, "told", {})}
    match error:
        case HTTPException():
            return error.status_code, {"message": str(error.detail)}
        case RequestValidationError() | ValidationError():
            # of a union's members, the one whose validation got deepest
            first = max(error.errors(), key=lambda entry: len(entry["loc"]))
            where = ".".join(str(part) for part in first["loc"] if part != "body")
            message = f"{where}: {first['msg']}" if where else first["msg"]
            return 400, {"message": message, "param": where or None}
        case Refused() | UnknownModel():
            return error.status, fields
        case CacheError():
            return 503, fields
        case ConfigError() | DataError() | PatternError():
            return 400, fields
        case HeadwayError():
            return 500, fields
    LOG.error("%s failed", request, exc_info=error)
    return 500, {"message": f"internal server error; see the server's log for request {request}"}


def failed(error: Exception, request: str, path: str) -> Json:
    """Returns the response that reports an exception, given the request's id and path."""
    status, fields = explained(error, request)
    headers = dict(getattr(error, "headers", None) or {})
    if status in (429, 503):  # a retry may succeed
        headers["retry-after"] = str(getattr(error, "again", AGAIN))
    return Json(shaped(status, **fields, path=path), status_code=status, headers=headers)
