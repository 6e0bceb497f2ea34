"""What changes the server while it runs: adapters that come and go, as in vLLM. An admin's key is needed."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict

from headway.serve.errors import Refused
from headway.serve.served import Decoding
from headway.serve.server import Server
from headway.serve.visits import VISIT


def check_admin() -> None:
    """Raises 403 where the key is not an admin's, or there are no keys."""
    visit = VISIT.get()
    if visit is None or not visit.key.admin:
        raise Refused("this needs a key of an admin: --keys FILE, with a line SECRET admin", 403)


Admin = Annotated[None, Depends(check_admin)]


class Named(BaseModel):
    """An adapter's name."""

    model_config = ConfigDict(extra="forbid")
    lora_name: str


class Loaded(Named):
    """And its folder, and the model that it is of, where there are several."""

    lora_path: str
    model: str | None = None


def routes(server: Server) -> APIRouter:
    """`POST /v1/load_lora_adapter`, `/v1/unload_lora_adapter`."""
    router, models = APIRouter(prefix="/v1"), server.models

    @router.post("/load_lora_adapter")
    async def load(body: Loaded, _: Admin) -> dict[str, str]:
        """An adapter of a model, as a model of its own name."""
        base = await models.find(body.model, Decoding)
        place = models.add_adapter(body.lora_name, models.places[base.name], body.lora_path)
        try:
            await models.open(place)
        except Exception:
            del models.places[place.name]
            raise
        return {"status": f"{body.lora_name} is loaded"}

    @router.post("/unload_lora_adapter")
    async def unload(body: Named, _: Admin) -> dict[str, str]:
        """No longer."""
        models.drop_adapter(body.lora_name)
        return {"status": f"{body.lora_name} is unloaded"}

    return router
