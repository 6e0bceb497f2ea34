"""The application: what a request must be, the routes, and how what fails is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute

from headway.serve.errors import Json, tell_errors
from headway.serve.guard import Guard
from headway.serve.openapi import describe
from headway.serve.routes import ROUTES
from headway.serve.server import Server


def make_app(server: Server, *, cors: Sequence[str] = (), **guard: Any) -> FastAPI:
    """A server of its models, over HTTP. `guard`: what requests must be (`Guard`); `cors`: whose pages may ask."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        expiring = asyncio.create_task(server.models.expire())
        yield
        expiring.cancel()
        server.worker.close()

    app = FastAPI(title="headway", default_response_class=Json, lifespan=life, docs_url=None, redoc_url=None)
    describe(app)
    tell_errors(app)
    app.add_middleware(Guard, server=server, **guard)
    if cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    routers = [routes(server) for routes in ROUTES]
    for router in routers:
        app.include_router(router)
    found = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    for route in found:  # without /v1, too, as llama.cpp has them
        bare = route.path.removeprefix("/v1")
        if bare not in {other.path for other in found}:
            app.add_api_route(bare, route.endpoint, methods=[*(route.methods or ())], include_in_schema=False)
    return app
