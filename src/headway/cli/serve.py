"""`headway serve MODEL...`: models behind an address."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from headway.cli._options import Count, Whole, says
from headway.cli._shared import note, set_threads
from headway.errors import ConfigError


@dataclass(frozen=True)
class Named:
    """A model and its name."""

    name: str
    source: str


def command(
    models: Annotated[list[str], says(metavar="MODEL...")],
    *,
    alias: list[str] | None = None,
    host: str = "127.0.0.1",
    port: Whole = 8080,
    dtype: str = "auto",
    threads: Count | None = None,
    exact: bool = False,
    strict: bool = False,
) -> None:
    """Answer requests of OpenAI's protocol, all of them together: http://HOST:PORT/v1. Ctrl-C ends it when what is
    being written is done.

    models: folders, GGUF files or ids of the Hub
    alias: NAME=MODEL, the name that requests give it; may be given often [default: the folder's name]
    host: who is listened to; other than this machine's own address, anybody who reaches it may ask
    port: of the address; 0 takes a free one
    exact: the same bits of logits however a text is read: slower prompts
    strict: refuse fields of requests that are unknown, rather than say that they change nothing
    """
    try:
        import uvicorn
    except ImportError as error:
        raise ConfigError("a server needs FastAPI and uvicorn: pip install 'headway[serve]'") from error
    set_threads(threads)
    from headway.api import load
    from headway.hardware import memory_total
    from headway.serve.app import make_app
    from headway.serve.served import Models, Served
    from headway.serve.worker import Worker

    worker = Worker()
    keep = memory_total() // 16 // len(models)
    served = []
    for named in names(models, alias or []):
        lm = load(named.source, dtype=dtype, task="causal-lm")
        served.append(Served(named.name, lm, worker, keep=keep, exact=exact))
        note(f"{named.name}: {named.source}, {served[-1].engine.reader.steps}")
    if not is_own(host):
        note(f"{host} is reached by others, who may ask without a key")
    app = make_app(Models(served), worker, strict=strict)
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=30)


def names(models: list[str], aliases: list[str]) -> list[Named]:
    """Each model with its name. Raises ConfigError for an alias of no model."""
    given = {}
    for alias in aliases:
        name, _, source = alias.partition("=")
        if not name or source not in models:
            raise ConfigError(f"--alias {alias}: write NAME=MODEL, of one of {', '.join(models)}")
        given[source] = name
    return [Named(given.get(model, Path(model).stem or model), model) for model in models]


def is_own(host: str) -> bool:
    """Whether an address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
