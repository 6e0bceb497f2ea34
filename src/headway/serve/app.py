"""The application: what a request must be, the routes, and how what fails is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from headway.serve.errors import Json, tell_errors
from headway.serve.guard import Guard
from headway.serve.routes import ROUTES
from headway.serve.server import Server


def make_app(server: Server, **guard: Any) -> FastAPI:
    """A server of its models, over HTTP. `guard`: what requests must be (`Guard`)."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        server.worker.close()

    app = FastAPI(title="headway", default_response_class=Json, lifespan=life, docs_url=None, redoc_url=None)
    tell_errors(app)
    app.add_middleware(Guard, **guard)
    for routes in ROUTES:
        app.include_router(routes(server))
    return app
