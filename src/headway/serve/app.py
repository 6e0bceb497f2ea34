"""The ASGI application: the checks of requests, the routes, and the schema that they declare (`/openapi.json`)."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from headway.serve.errors import Json, Refused
from headway.serve.guard import Guard
from headway.serve.routes import ROUTES, page
from headway.serve.server import Server

STATUSES = {
    400: "invalid request",
    401: "missing or wrong API key",
    403: "host not allowed, or key without permission",
    404: "unknown model or path",
    405: "method not allowed",
    408: "the body did not arrive in time",
    413: "body too large",
    429: "too many requests; with Retry-After",
    431: "headers too large",
    499: "the client disconnected",
    500: "internal server error",
    501: "switched off",
    503: "temporarily unavailable",
}
"""Statuses that the response to any request may have, and why."""


class Failure(BaseModel):
    """The message of an error, and its kind."""

    message: str
    type: str


class Error(BaseModel):
    """The body of a response that reports an error."""

    error: Failure


class App(FastAPI):
    """A FastAPI application whose schema declares one error format for all routes, in place of FastAPI's own 422."""

    def openapi(self) -> dict[str, Any]:
        """Returns the OpenAPI schema, like `FastAPI.openapi`, without the status 422."""
        schema = super().openapi()
        for operation in (entry for path in schema["paths"].values() for entry in path.values()):
            operation["responses"].pop("422", None)
        return schema


def make_app(server: Server, *, cors: Sequence[str] = (), off: Collection[str] = (), **guard: Any) -> FastAPI:
    """Returns the ASGI application of a server.

    guard: arguments of `Guard`, which checks requests.   cors: origins whose pages may send requests.
    off: paths that are switched off: these answer 501, and the page (`/`) 404.
    """

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        expiring = asyncio.create_task(server.models.expire())
        yield
        expiring.cancel()
        server.worker.close()

    async def raised(request: Request, error: Exception) -> NoReturn:
        raise error  # the guard reports it, like every other error

    app = App(
        title="headway",
        default_response_class=Json,
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        responses={status: {"description": why, "model": Error} for status, why in STATUSES.items()},
        exception_handlers={HTTPException: raised, RequestValidationError: raised},
    )
    app.add_middleware(Guard, server=server, **guard)
    if cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    for path in {*off} - {"/"}:
        app.add_api_route(path, _switched_off, methods=["GET", "POST"], include_in_schema=False)
    routers = [routes(server) for routes in ROUTES if not (routes is page.routes and "/" in off)]
    for router in routers:
        app.include_router(router)
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    for route in routes:  # also without /v1, as in llama.cpp
        bare = route.path.removeprefix("/v1")
        if bare not in {other.path for other in routes}:
            app.add_api_route(bare, route.endpoint, methods=[*(route.methods or ())], include_in_schema=False)
    return app


def _switched_off() -> None:
    raise Refused("this path is switched off on this server", 501)
