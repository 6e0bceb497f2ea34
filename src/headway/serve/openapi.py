"""What the application says of itself (`/openapi.json`): the statuses that any request may meet, and streams."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

STATUSES = {
    400: "what is wrong with the request",
    401: "no key",
    403: "another host",
    404: "no such model",
    405: "another method",
    408: "the body did not come in time",
    413: "too large a body",
    429: "too many requests; with Retry-After",
    431: "too large a head",
    499: "the client has left",
    500: "the server failed",
    501: "switched off",
    503: "not now",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        }
    },
}


def describe(app: FastAPI) -> None:
    """Has an application declare what it answers: errors of one shape for every route, in place of the framework's own,
    and events where a body may ask for a stream."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        made = plain()
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        schemas["Error"] = ERROR
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        errors = {str(status): {"description": why, "content": content} for status, why in STATUSES.items()}
        for operation in (each for path in made["paths"].values() for each in path.values()):
            answers = operation["responses"]
            answers.pop("422", None)
            answers |= errors
            if "stream" in _properties(operation, schemas):
                answers["200"]["content"]["text/event-stream"] = {}
        return made

    app.openapi = openapi  # type: ignore[method-assign]


def _properties(operation: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Of the body that it reads."""
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    found: dict[str, Any] = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)
    return found.get("properties", {})  # type: ignore[no-any-return]
