"""Routes for health, readiness and metrics, and to load and unload adapters as in vLLM, with an admin's key."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from headway.serve.errors import Refused, Unavailable
from headway.serve.served import Decoding
from headway.serve.server import Server
from headway.serve.visits import VISIT


class Named(BaseModel, extra="forbid"):
    """An adapter's name."""

    lora_name: str


class Loaded(Named):
    """An adapter's name and folder, and its model if there are several."""

    lora_path: str
    model: str | None = None


def check_admin() -> None:
    """Raises Refused with status 403 if the key is not an admin's, or if there are no keys."""
    visit = VISIT.get()
    if visit is None or not visit.key.admin:
        raise Refused("an admin's key is needed: a line `SECRET admin` in the server's --keys FILE", 403)


Admin = Annotated[None, Depends(check_admin)]


def routes(server: Server) -> APIRouter:
    """Returns the routes `GET /health`, `/ready`, `/metrics`; `POST /v1/load_lora_adapter`,
    `/v1/unload_lora_adapter`."""
    router, models = APIRouter(), server.models

    @router.get("/health")
    def health() -> dict[str, str]:
        """Returns whether the worker's thread runs."""
        if not server.worker.is_alive:
            raise Unavailable("the engine thread has died; restart the server")
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> dict[str, Any]:
        """Returns whether the server is ready: each loaded model is checked once."""
        await models.check()
        return {"status": "ready", "models": {name: place.state for name, place in models.places.items()}}

    @router.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        """Returns the metrics for Prometheus."""
        begun = {"Process-Start-Time-Unix": f"{server.begun:.0f}"}
        return Response(server.metrics(), media_type=CONTENT_TYPE_LATEST, headers=begun)

    @router.post("/v1/load_lora_adapter")
    async def load(body: Loaded, _: Admin) -> dict[str, str]:
        """Loads an adapter of a model, as a model with its own name."""
        base = await models.find(body.model, Decoding)
        place = models.add_adapter(body.lora_name, models.places[base.name], body.lora_path)
        try:
            await models.open(place)
        except Exception:
            del models.places[place.name]
            raise
        return {"status": f"{body.lora_name} is loaded"}

    @router.post("/v1/unload_lora_adapter")
    async def unload(body: Named, _: Admin) -> dict[str, str]:
        """Unloads an adapter."""
        models.drop_adapter(body.lora_name)
        return {"status": f"{body.lora_name} is unloaded"}

    return router
