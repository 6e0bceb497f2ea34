"""The application: what a request must be, the routes, and how what fails is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from headway.serve.errors import Json, tell_errors
from headway.serve.guard import Guard
from headway.serve.openapi import describe
from headway.serve.routes import ROUTES
from headway.serve.server import Server


def make_app(server: Server, **guard: Any) -> FastAPI:
    """A server of its models, over HTTP. `guard`: what requests must be (`Guard`)."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        server.worker.close()

    app = FastAPI(title="headway", default_response_class=Json, lifespan=life, docs_url=None, redoc_url=None)
    describe(app)
    tell_errors(app)
    app.add_middleware(Guard, **guard)
    routers = [routes(server) for routes in ROUTES]
    for router in routers:
        app.include_router(router)
    found = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    for route in found:  # without /v1, too, as llama.cpp has them
        bare = route.path.removeprefix("/v1")
        if bare not in {other.path for other in found}:
            app.add_api_route(bare, route.endpoint, methods=[*(route.methods or ())], include_in_schema=False)
    return app
