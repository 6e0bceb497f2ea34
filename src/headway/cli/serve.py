"""`headway serve MODEL...`: serves models over HTTP; `headway run MODEL`: serves one and chats with it."""

import ipaddress
import threading
import webbrowser
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated

from headway.cli._options import Count, Whole, says
from headway.cli._shared import note, set_threads
from headway.cli.chat import asked, talk_with
from headway.cli.generate import SamplingRun
from headway.errors import ConfigError, HeadwayError

if TYPE_CHECKING:
    from headway.serve.server import Server

DEMO = Path("runs/demo")
OWN = ("localhost", "127.0.0.1", "[::1]")
"""Host names of this machine for itself."""


@dataclass(frozen=True)
class ServerRun:
    """The models of a server, and how they answer.

    models: folders, GGUF files or ids of the Hub, for any task
    alias: NAME=MODEL, another name for a model; may be repeated, the first is reported [default: the folder's name]
    tag: a word that /v1/models reports for the model NAME; may be repeated
    adapter: an adapter of the first model, served under its own name; may be repeated
    exact: logits independent of batching and caching, bit for bit; slower prompts
    strict: refuse unknown request fields, instead of warning that they have no effect
    memory: limit for weights and KV caches of all models; idle ones are unloaded to make room [default: half of the
        machine's]
    on_demand: load a model at its first request
    ttl: unload a model that has been idle for this long
    slots: requests that run at once; others wait [default: no limit]
    waiting: requests that run or wait; more are refused with 429
    waiting_tokens: prompt tokens that may wait [default: no limit]
    prefixes: folder in which the prefix cache is saved when the server stops, for its next start; the files reveal the
        texts [default: not saved]
    """

    models: Annotated[list[str] | None, says(metavar="MODEL...")] = None
    _: KW_ONLY
    alias: list[str] | None = None
    tag: Annotated[list[str] | None, says(metavar="NAME=WORD")] = None
    adapter: Annotated[list[str] | None, says(metavar="NAME=FOLDER")] = None
    dtype: str = "auto"
    threads: Count | None = None
    exact: bool = False
    strict: bool = False
    memory: Annotated[float | None, says(min=0.001, metavar="GB")] = None
    on_demand: bool = False
    ttl: Annotated[float | None, says(min=1, metavar="SECONDS")] = None
    slots: Count | None = None
    waiting: Count = 256
    waiting_tokens: Count | None = None
    prefixes: Path | None = None

    def end(self, server: "Server") -> None:
        """Saves the prefix caches of the models, if requested."""
        from headway.serve.served import Decoding
        from headway.serve.stored import save_stored

        for place in server.models.loaded() if self.prefixes is not None else ():
            if isinstance(place.model, Decoding) and place.base is None and self.prefixes is not None:
                try:
                    note(f"{place.name}: {save_stored(place.model, self.prefixes)} pages of texts stay")
                except HeadwayError as error:  # a sequence that was interrupted, or a full disk
                    note(f"{place.name}: its pages of texts are lost: {error}")

    def open(self) -> "Server":
        """Returns a server of these models, and of adapters of the first of them. Raises ConfigError if none can be
        loaded; if some cannot, a note says so, and loading is tried again when they are requested."""
        try:
            from headway.serve.models import Models, Place, size_of
        except ImportError as error:
            raise ConfigError("a server needs FastAPI and uvicorn: pip install 'headway[serve]'") from error
        from headway.api import load
        from headway.checkpoints.remote import local_model
        from headway.hardware import memory_total
        from headway.serve.calls import served_as
        from headway.serve.errors import Unavailable
        from headway.serve.served import Decoding, Served
        from headway.serve.server import Server
        from headway.serve.stored import load_stored
        from headway.serve.worker import Worker

        named, adapters = names(self.models or [], self.alias or []), pairs(self.adapter or [])
        tags = pairs(self.tag or [])
        for name in {name for name, _ in tags} - {name for aliases, _ in named for name in aliases}:
            raise ConfigError(
                f"--tag {name}: no model has this name; use the model's alias, or without one its name"
            )
        set_threads(self.threads)
        worker = Worker(self.waiting, self.waiting_tokens, slots=self.slots)

        def place(aliases: list[str], source: str) -> Place:
            def build() -> Served:
                model = served_as(
                    aliases[0], load(source, dtype=self.dtype), worker, keep=0, exact=self.exact
                )
                model.source = local_model(source)
                if self.prefixes is not None and isinstance(model, Decoding):
                    load_stored(model, self.prefixes)
                return model

            words = [word for name, word in tags if name in aliases]
            size = size_of(Path(source))
            return Place(aliases[0], build, size=size, aliases=aliases, tags=words, source=source)

        memory = memory_total() // 2 if self.memory is None else int(self.memory * 1e9)
        models = Models([place(*pair) for pair in named], memory=memory, ttl=self.ttl)
        for name, folder in adapters:
            models.add_adapter(name, models.places[named[0][0][0]], folder)
        errors = []
        for slot in [] if self.on_demand else models.places.values():
            try:
                note(f"{slot.name} is loaded, for {models.load(slot).task}")
            except Unavailable as error:
                errors.append(str(error))
        if errors and len(errors) == len(models.places):
            worker.close()
            raise ConfigError("; ".join(errors))
        for text in errors:
            note(text)
        return Server(models, worker, self.strict)


def command(
    run: ServerRun,
    *,
    demo: bool = False,
    host: str = "127.0.0.1",
    port: Whole = 8080,
    keys: Path | None = None,
    without_key: bool = False,
    cors: Annotated[list[str] | None, says(metavar="ORIGIN")] = None,
    off: Annotated[list[str] | None, says(metavar="PATH")] = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    drain: Annotated[float, says(min=0, metavar="SECONDS")] = 30.0,
    log: Path | None = None,
) -> None:
    """Serve models over HTTP with OpenAI's protocol, with continuous batching: http://HOST:PORT/v1. Ctrl-C stops it
    once running requests are done, a second Ctrl-C at once.

    demo: serve the model of `headway demo` in runs/demo, and open the page
    host: address to listen on, or several separated by commas; other machines reach any but this machine's own
    port: port to listen on; 0 takes a free one
    keys: file of API keys, one of which requests must have; a line: SECRET [name=NAME] [requests=N] [tokens=N] [admin]
    without_key: accept requests from other machines without a key
    cors: accept requests from pages of this origin; may be repeated
    off: switch off a path, e.g. /metrics, /slots, or / for the page; may be repeated
    tls_cert: certificate (PEM), for https
    tls_key: its private key
    drain: time to finish running requests when the server stops
    log: file of JSON lines, one per request, without its text
    """
    run = replace(run, models=[*(run.models or []), *([demo_model()] if demo else [])])
    if not run.models:
        raise ConfigError("serve: give a model, or --demo")
    addresses = host.split(",")
    hosts = OWN if all(map(is_own, addresses)) else None
    if hosts is None and keys is None and not without_key:
        raise ConfigError(
            f"--host {host}: other machines can reach it; give --keys FILE, or --without-key to serve anybody"
        )
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together; give both, or neither")
    server = run.open()
    from headway.serve.app import make_app
    from headway.serve.running import Listener, log_to
    from headway.serve.visits import read_keys

    log_to(log)
    known = [] if keys is None else read_keys(keys)
    app = make_app(server, cors=cors or (), off=off or (), hosts=hosts, keys=known)

    def listening(address: str) -> None:
        note(f"listening: {address}, with a page")
        if demo:
            webbrowser.open(address)

    tls = {"ssl_certfile": tls_cert, "ssl_keyfile": tls_key}
    Listener(server, app, host=addresses, port=port, patience=drain, say=listening, **tls).run()
    run.end(server)


def run(
    model: str,
    *,
    system: str | None = None,
    temperature: Annotated[float, says(short="-t")] = 0.8,
    max_new_tokens: Annotated[Whole | None, says(short="-n")] = None,
    seed: int = 0,
    dtype: str = "auto",
    threads: Count | None = None,
) -> None:
    """Download a model if it is missing, serve it on a free port of this machine, and chat with it; other programs here
    may use it meanwhile.

    system: system message
    temperature: 0 is greedy
    max_new_tokens: maximum number of new tokens [default: until the model or the context ends]
    seed: equal seeds give equal text
    """
    server = ServerRun([model], dtype=dtype, threads=threads).open()
    from headway.endpoints import ServerEndpoint
    from headway.serve.app import make_app
    from headway.serve.running import Listener, log_to

    log_to(None)
    urls: SimpleQueue[str] = SimpleQueue()
    listener = Listener(server, make_app(server, hosts=OWN), host="127.0.0.1", port=0, say=urls.put)
    thread = threading.Thread(target=listener.run, daemon=True)
    thread.start()
    settings = asked(SamplingRun(model, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed))
    try:
        talk_with(ServerEndpoint(f"{urls.get()}/v1", *server.models.places, say=note), system, settings)
    finally:
        listener.drain()
        thread.join()


def demo_model() -> str:
    """Returns the folder that `headway demo` writes. Raises ConfigError if there is none."""
    if not (DEMO / "config.json").exists():
        raise ConfigError(f"--demo: there is no model in {DEMO}; make one with `headway demo` (3 minutes)")
    return str(DEMO)


def names(models: list[str], aliases: list[str]) -> list[tuple[list[str], str]]:
    """Returns each model with its names. Raises ConfigError for an alias of a model that is not listed."""
    by_model: dict[str, list[str]] = {model: [] for model in models}
    for name, model in pairs(aliases):
        if model not in by_model:
            raise ConfigError(f"--alias {name}={model}: {model} is not among the models: {', '.join(models)}")
        by_model[model].append(name)
    return [(by_model[model] or [default_name(model)], model) for model in models]


def default_name(model: str) -> str:
    """Returns the last part of a path or id, without the suffix of a file: Qwen/Qwen2.5-0.5B is Qwen2.5-0.5B."""
    path = Path(model)
    return (path.stem if path.suffix in (".gguf", ".bin") else path.name) or model


def pairs(texts: list[str]) -> list[tuple[str, str]]:
    """Splits NAME=SOURCE texts into pairs. Raises ConfigError for a text of another form."""
    for text in texts:
        if not all(text.partition("=")):
            raise ConfigError(
                f"{text!r}: write NAME=MODEL (--alias), NAME=FOLDER (--adapter) or NAME=TAG (--tag)"
            )
    return [(name, source) for name, _, source in (text.partition("=") for text in texts)]


def is_own(host: str) -> bool:
    """Returns whether an address is a loopback address of this machine."""
    with suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False
