"""A server that says when it listens."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn


class Announced(uvicorn.Server):
    """Calls `listening` with its address as soon as it can be asked."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[str], None]) -> None:
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`; it ends without listening where the address is taken."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._listening(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
