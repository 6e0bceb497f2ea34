"""Whether a server lives."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.exceptions import HTTPException

from headway.serve.server import Server


def routes(server: Server) -> APIRouter:
    """`GET /health`."""
    router = APIRouter()

    @router.get("/health")
    def health() -> dict[str, str]:
        """Whether the thread that writes lives."""
        if not server.worker.is_alive:
            raise HTTPException(503, "the thread of the engines has ended; restart the server")
        return {"status": "ok"}

    return router
