"""Models that answer conversations, on a server with OpenAI's protocol or in a local folder; and their transcripts."""

from collections.abc import Callable

from headway.endpoints.local import LocalEndpoint
from headway.endpoints.server import USUAL_TIMEOUT, ServerEndpoint
from headway.endpoints.transcript import Endpoint, Reply, Transcript, in_order
from headway.errors import ConfigError

__all__ = [
    "Endpoint",
    "LocalEndpoint",
    "Reply",
    "ServerEndpoint",
    "Transcript",
    "in_order",
    "open_endpoint",
]


def is_server(source: str) -> bool:
    """Returns whether an address is a server's."""
    return source.startswith(("http://", "https://"))


def open_endpoint(
    source: str, *, timeout: float | None = None, say: Callable[[str], None] = lambda text: None
) -> Endpoint:
    """Returns the endpoint of an address: "https://host/v1#model" is a model of a server (without #model, its only
    one); anything else is a folder or an id of the Hub, for `headway.load`. For `timeout` and `say`, see
    `ServerEndpoint`.

    Raises ConfigError for a timeout without a server, and what either endpoint raises."""
    if is_server(source):
        url, _, model = source.partition("#")
        return ServerEndpoint(url, model or None, timeout=timeout or USUAL_TIMEOUT, say=say)
    if timeout is not None:
        raise ConfigError(
            f"timeout is for servers (http:// or https://), and {source} is not one; leave it out"
        )
    return LocalEndpoint(source)
