"""Whether a server lives, is ready, and what it counts."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from headway.serve.errors import Unavailable
from headway.serve.server import Server


def routes(server: Server) -> APIRouter:
    """`GET /health`, `/ready`, `/metrics`."""
    router = APIRouter()

    @router.get("/health")
    def health() -> dict[str, str]:
        """Whether the thread that writes lives."""
        if not server.worker.is_alive:
            raise Unavailable("the thread of the engines has ended; restart the server")
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> dict[str, Any]:
        """Whether requests may come: each model that is loaded has been checked, once."""
        await server.models.check()
        return {
            "status": "ready",
            "models": {name: place.state for name, place in server.models.places.items()},
        }

    @router.get("/metrics")
    def metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(server.metrics.tell(), media_type=CONTENT_TYPE_LATEST)

    return router
