"""Models that answer messages: a server that speaks OpenAI's protocol, or a folder here; and what they said, kept."""

from headway.endpoints.base import Endpoint, Reply
from headway.endpoints.local import LocalEndpoint
from headway.endpoints.server import ServerEndpoint
from headway.endpoints.transcript import Transcript, in_order

__all__ = ["Endpoint", "LocalEndpoint", "Reply", "ServerEndpoint", "Transcript", "in_order", "open_endpoint"]


def open_endpoint(source: str) -> Endpoint:
    """The endpoint of an address: "https://host/v1#model" is a server's model (without #model, the only one that it
    has), anything else a folder or an id of the Hub, for `headway.load`."""
    if source.startswith(("http://", "https://")):
        url, _, model = source.partition("#")
        return ServerEndpoint(url, model or None)
    return LocalEndpoint(source)
