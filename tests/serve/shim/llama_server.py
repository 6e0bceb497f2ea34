"""`llama-server` in front of `headway serve`: its flags become ours, its names of paths and fields become ours.

Nothing else is changed: what is answered is what the server answers. `SHIM_MODELS` is a folder of models by the last
part of their `--hf-repo`; of a model that is not there only `/health` is answered, since a session of llama.cpp's tests
begins by starting everything once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

PATHS = {
    "/chat/completions": "/v1/chat/completions",
    "/v1/chat/completions": "/v1/chat/completions",
    "/embeddings": "/v1/embeddings",
    "/models": "/v1/models",
    "/responses": "/v1/responses",
}
FORMATS = {"json_schema": "json", "grammar": "grammar"}
"""Fields that say what a text may be."""
TAKEN = "ubatch-size threads cache-ram slot-save-path media-path reasoning-format pooling cors-origins"
"""Flags with a value that change nothing here."""
SWITCHES = (
    "offline slots jinja no-jinja cont-batching kv-unified swa-full context-shift embedding reranking "
    "no-cache-idle-slots no-mmproj backend_sampling ui-mcp-proxy"
)


def flags() -> argparse.ArgumentParser:
    """Those of llama-server that its tests give."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--temp", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--n-predict", type=int)
    parser.add_argument("--ctx-size", type=int)
    for name in ("parallel", "batch-size", "sleep-idle-seconds"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("hf-repo", "hf-file", "model", "alias", "tags", "api-key", "reasoning", "chat-template"):
        parser.add_argument(f"--{name}")
    for name in ("chat-template-file", *TAKEN.split()):
        parser.add_argument(f"--{name}")
    for name in ("no-slots", "metrics", "no-ui", "verbose", *SWITCHES.split()):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("-fa")
    return parser


class Renamed:
    """An application under llama-server's names.

    defaults: fields that a flag has given, for requests that say nothing of them.
    """

    def __init__(self, app: Callable[..., Any], given: argparse.Namespace) -> None:
        self.app, self.given = app, given
        named = {"temperature": given.temp, "seed": given.seed}
        self.defaults = {name: value for name, value in named.items() if value is not None}
        thinks = given.reasoning != "off"
        self.of_chats = {"chat_template_kwargs": {"enable_thinking": thinks}} if given.reasoning else {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        scope["path"] = path = PATHS.get(scope["path"], scope["path"])
        if scope["method"] != "POST":
            return await self.app(scope, receive, send)
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        sent = [self.translated(path, body)]

        async def again() -> Any:
            return {"type": "http.request", "body": sent.pop()} if sent else await receive()

        return await self.app(scope, again, send)

    def translated(self, path: str, body: bytes) -> bytes:
        """A body in our names."""
        import orjson

        try:
            said = orjson.loads(body)
        except ValueError:
            return body
        if not isinstance(said, dict):
            return body
        said = {name: value for name, value in said.items() if value is not None}
        said.pop("model", None)  # one model is served, whatever it is called
        length = "n_predict" if path in ("/completion", "/infill") else "max_tokens"
        if length != "n_predict" and "n_predict" in said:
            said[length] = said.pop("n_predict")
        for name, ours in FORMATS.items():
            if name in said:
                said["structured_outputs"] = {ours: said.pop(name)}
        if path in ("/apply-template", "/v1/chat/completions"):
            said = {**self.of_chats, **said}
        if path in ("/v1/completions", "/v1/chat/completions") and self.given.verbose:
            said.setdefault("verbose", True)
        if path in ("/completion", "/infill", "/v1/completions", "/v1/chat/completions"):
            said = {**self.defaults, **said}
            if self.given.n_predict is not None:
                said.setdefault(length, self.given.n_predict)
        return orjson.dumps(said)


def serve(given: argparse.Namespace, folder: Path) -> None:
    """The server of a model."""
    import uvicorn

    from headway.api import load
    from headway.serve.app import make_app
    from headway.serve.models import Models, Place
    from headway.serve.served import Decoding
    from headway.serve.server import Server
    from headway.serve.visits import Key
    from headway.serve.worker import Worker
    from headway.text.chat import BUILT_IN, ChatTemplate

    lm = load(folder, task="causal-lm")
    if given.ctx_size:
        lm.model.spec = replace(
            lm.spec, trained_context=given.ctx_size // (1 if given.kv_unified else given.parallel or 1)
        )
    file = given.chat_template_file
    template = Path(file).read_text() if file else given.chat_template or "chatml"
    template = ChatTemplate.find(template).source if template in BUILT_IN else template
    if "bos_token" not in template:  # llama-server begins every prompt with it
        template = "{{ bos_token }}" + template
    lm.tokenizer = lm.need_tokenizer().with_chat_template(template)
    worker, names = Worker(slots=given.parallel), sorted((given.alias or folder.name).split(","))

    def made() -> Decoding:
        model = Decoding(names[0], lm, worker, keep=1 << 26)
        model.engine.step_tokens = given.batch_size or model.engine.step_tokens
        return model

    place = Place(names[0], made, aliases=names, tags=(given.tags or "").split(","), source=str(folder))
    models = Models([place], ttl=given.sleep_idle_seconds)
    models.load(place)
    off = {"/slots": given.no_slots, "/metrics": not given.metrics, "/": given.no_ui}
    app = make_app(
        Server(models, worker),
        keys=[Key(given.api_key)] if given.api_key else [],
        off=[path for path, is_off in off.items() if is_off],
    )
    host: Any = given.host.split(",")
    uvicorn.run(Renamed(app, given), host=host, port=given.port, log_level="warning")  # type: ignore[arg-type]


def only_health(given: argparse.Namespace) -> None:
    """Answers that it is there."""

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ok"}')

    HTTPServer((given.host, given.port), Healthy).serve_forever()


def main(arguments: list[str]) -> None:
    given, unknown = flags().parse_known_args(arguments)
    if unknown:
        print(unknown, file=sys.stderr)  # they have no counterpart
    folder = Path(os.environ["SHIM_MODELS"]) / (given.hf_repo or "none").rpartition("/")[2]
    serve(given, folder) if folder.is_dir() else only_health(given)
