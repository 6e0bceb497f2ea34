"""Answers that report failures: in OpenAI's shape, or in Anthropic's."""

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
"""Seconds after which a client that was refused for lack of room may ask again."""


class UnknownModel(ConfigError):
    """A name that no model of the server has."""

    status, told = 404, {"code": "model_not_found"}


class PromptTooLong(ConfigError):
    """A prompt that leaves no room for an answer."""

    def __init__(self, tokens: int, context: int) -> None:
        super().__init__(
            f"a prompt of {tokens} tokens exceeds the available context size ({context} tokens); shorten it"
        )
        self.told = {"type": "exceed_context_size_error", "n_prompt_tokens": tokens, "n_ctx": context}
        self.told["code"] = "context_length_exceeded"


class Refused(HeadwayError):
    """A request that is refused, and the status of its answer; `again`: seconds after which it may be otherwise."""

    status = 400

    def __init__(self, message: str, status: int | None = None, again: int = AGAIN) -> None:
        super().__init__(message)
        self.status, self.again = status or self.status, again


class Busy(Refused):
    """There is no room for another request now."""

    status = 429


class Unavailable(Refused):
    """Raised where what is asked for cannot be had now, and the request is not to blame."""

    status = 503


class Json(JSONResponse):
    """An answer of JSON."""

    def render(self, content: Any) -> bytes:
        return encoded(content)


def encoded(content: Any) -> bytes:
    """Content as JSON; integers of any size, which `orjson` does not know, too."""
    try:
        return orjson.dumps(content)
    except TypeError:
        return json.dumps(content).encode()


def shaped(status: int, message: str, *, path: str = "", **more: Any) -> dict[str, Any]:
    """A failure as OpenAI's clients read it (with more fields: `param`, `code`, ...); as Anthropic's do on the paths
    of its protocol."""
    if path.startswith("/v1/messages"):
        kind = ANTHROPIC.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None, **more}}


def warned(warnings: Sequence[str]) -> dict[str, Any]:
    """The field of an answer that tells warnings, where there are any."""
    return {"warnings": [*warnings]} if warnings else {}


def explained(error: Exception, request: str) -> tuple[int, dict[str, Any]]:
    """The status for what was raised, and the fields of its answer, as `shaped` takes them. Errors that are unknown
    here are logged under the id of the request."""
    fields = {"message": str(error), **getattr(error, "told", {})}
    match error:
        case HTTPException():
            return error.status_code, {"message": str(error.detail)}
        case RequestValidationError() | ValidationError():
            first = max(error.errors(), key=lambda entry: len(entry["loc"]))  # of a union, what came closest
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
    return 500, {"message": f"the server failed; its log has more of {request}"}


def failed(error: Exception, request: str, path: str) -> Json:
    """The answer to a request, by its id and path, that reports what was raised."""
    status, fields = explained(error, request)
    headers = dict(getattr(error, "headers", None) or {})
    if status in (429, 503):  # coming again may help
        headers["retry-after"] = str(getattr(error, "again", AGAIN))
    return Json(shaped(status, **fields, path=path), status_code=status, headers=headers)
