"""`headway serve MODEL...`: models behind an address."""

import ipaddress
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from headway.cli._options import Count, Whole, says
from headway.cli._shared import note, set_threads
from headway.errors import ConfigError

DEMO = Path("runs/demo")
OWN = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine for itself."""


@dataclass(frozen=True)
class Named:
    """A model and its name."""

    name: str
    source: str


def command(
    models: Annotated[list[str] | None, says(metavar="MODEL...")] = None,
    *,
    demo: bool = False,
    alias: list[str] | None = None,
    host: str = "127.0.0.1",
    port: Whole = 8080,
    dtype: str = "auto",
    threads: Count | None = None,
    exact: bool = False,
    strict: bool = False,
    keys: Path | None = None,
    without_key: bool = False,
    waiting: Count = 256,
) -> None:
    """Answer requests of OpenAI's protocol, all of them together: http://HOST:PORT/v1. Ctrl-C ends it when what is
    being written is done.

    models: folders, GGUF files or ids of the Hub, of any task
    demo: serve what `headway demo` left in runs/demo, and open the page
    alias: NAME=MODEL, the name that requests give it; may be given often [default: the folder's name]
    host: who is listened to; other than this machine's own address, anybody who reaches it may ask
    port: of the address; 0 takes a free one
    exact: the same bits of logits however a text is read: slower prompts
    strict: refuse fields of requests that are unknown, rather than say that they change nothing
    keys: a file of keys, one a line, one of which a request must give
    without_key: let others than this machine ask without a key
    waiting: requests that are written or wait at once; more are told to come again
    """
    models = [*(models or []), *([demo_model()] if demo else [])]
    if not models:
        raise ConfigError("serve: name a model, or give --demo")
    if not is_own(host) and keys is None and not without_key:
        raise ConfigError(
            f"--host {host}: others reach it; give --keys FILE, or --without-key to let anybody ask"
        )
    try:
        import uvicorn
    except ImportError as error:
        raise ConfigError("a server needs FastAPI and uvicorn: pip install 'headway[serve]'") from error
    set_threads(threads)
    from headway.api import load
    from headway.hardware import memory_total
    from headway.serve.announced import Announced
    from headway.serve.app import make_app
    from headway.serve.models import Models
    from headway.serve.served import Decoding
    from headway.serve.server import Server
    from headway.serve.tasks import served_as
    from headway.serve.worker import Worker

    worker = Worker(waiting)
    keep = memory_total() // 16 // len(models)
    served = []
    for named in names(models, alias or []):
        model = served_as(named.name, load(named.source, dtype=dtype), worker, keep=keep, exact=exact)
        steps = f", {model.engine.reader.steps}" if isinstance(model, Decoding) else ""
        note(f"{named.name}: {named.source}, {model.what}{steps}")
        served.append(model)
    app = make_app(
        Server(Models(served), worker, strict),
        hosts=OWN if is_own(host) else None,
        keys=[] if keys is None else read_keys(keys),
    )
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=30)

    def listening(address: str) -> None:
        note(f"listening: {address}, with a page")
        if demo:
            webbrowser.open(address)

    Announced(config, listening).run()


def demo_model() -> str:
    """The folder that `headway demo` writes. Raises ConfigError where there is none."""
    if not (DEMO / "config.json").exists():
        raise ConfigError(f"--demo: there is no model in {DEMO}; make one with `headway demo` (3 minutes)")
    return str(DEMO)


def read_keys(path: Path) -> list[str]:
    """The keys of a file. Raises ConfigError where it has none."""
    keys = path.read_text().split()
    if not keys:
        raise ConfigError(f"--keys {path}: there is no key in it; write one a line")
    return keys


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
