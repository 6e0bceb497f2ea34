"""What the commands that ask endpoints have in common."""

from typing import TYPE_CHECKING

from headway.cli._shared import note
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.endpoints import Endpoint


def check_timeout(timeout: float | None, *sources: str) -> None:
    """ConfigError for a timeout where no source is a server."""
    from headway.endpoints import is_server

    if timeout is not None and not any(map(is_server, sources)):
        raise ConfigError("--timeout is of servers, and none is asked; leave it out")


def opened(source: str, timeout: float | None) -> "Endpoint":
    """The endpoint of an address; what it says of failed tries goes to stderr."""
    from headway.endpoints import is_server, open_endpoint

    return open_endpoint(source, timeout=timeout if is_server(source) else None, say=note)
