"""`llama-server` in front of `headway serve`: its flags become ours, its names of paths and fields become ours.

Nothing else is changed: answers are those of our server. `SHIM_MODELS` is a folder of models, named by the last part of
their `--hf-repo`; for a model that is absent only `/health` is answered, since a session of llama.cpp's tests begins by
starting everything once.
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
"""Fields that constrain a text, with their names in `structured_outputs`."""
TAKEN = "ubatch-size threads cache-ram slot-save-path media-path reasoning-format pooling cors-origins"
"""Flags with a value that have no effect here."""
SWITCHES = (
    "offline slots jinja no-jinja cont-batching kv-unified swa-full context-shift embedding reranking "
    "no-cache-idle-slots no-mmproj backend_sampling ui-mcp-proxy"
)


def flags() -> argparse.ArgumentParser:
    """Returns a parser of those flags of llama-server that its tests use."""
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

    defaults: values that flags give to fields, for requests that leave the fields out.
    """

    def __init__(self, app: Callable[..., Any], options: argparse.Namespace) -> None:
        self.app, self.given = app, options
        values = {"temperature": options.temp, "seed": options.seed}
        self.defaults = {name: value for name, value in values.items() if value is not None}
        thinks = options.reasoning != "off"
        self.of_chats = {"chat_template_kwargs": {"enable_thinking": thinks}} if options.reasoning else {}

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
        """Returns a request body with our names of its fields."""
        import orjson

        try:
            fields = orjson.loads(body)
        except ValueError:
            return body
        if not isinstance(fields, dict):
            return body
        fields = {name: value for name, value in fields.items() if value is not None}
        fields.pop("model", None)  # one model is served, whatever name a request gives
        length = "n_predict" if path in ("/completion", "/infill") else "max_tokens"
        if length != "n_predict" and "n_predict" in fields:
            fields[length] = fields.pop("n_predict")
        for name, ours in FORMATS.items():
            if name in fields:
                fields["structured_outputs"] = {ours: fields.pop(name)}
        if path in ("/apply-template", "/v1/chat/completions"):
            fields = {**self.of_chats, **fields}
        if path in ("/v1/completions", "/v1/chat/completions") and self.given.verbose:
            fields.setdefault("verbose", True)
        if path in ("/completion", "/infill", "/v1/completions", "/v1/chat/completions"):
            fields = {**self.defaults, **fields}
            if self.given.n_predict is not None:
                fields.setdefault(length, self.given.n_predict)
        return orjson.dumps(fields)


def serve(options: argparse.Namespace, folder: Path) -> None:
    """Serves a model."""
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
    if options.ctx_size:
        lm.model.spec = replace(
            lm.spec, trained_context=options.ctx_size // (1 if options.kv_unified else options.parallel or 1)
        )
    file = options.chat_template_file
    template = Path(file).read_text() if file else options.chat_template or "chatml"
    template = ChatTemplate.find(template).source if template in BUILT_IN else template
    if "bos_token" not in template:  # llama-server begins every prompt with it
        template = "{{ bos_token }}" + template
    lm.tokenizer = lm.need_tokenizer().with_chat_template(template)
    worker, names = Worker(slots=options.parallel), sorted((options.alias or folder.name).split(","))

    def made() -> Decoding:
        model = Decoding(names[0], lm, worker, keep=1 << 26)
        model.engine.step_tokens = options.batch_size or model.engine.step_tokens
        return model

    place = Place(names[0], made, aliases=names, tags=(options.tags or "").split(","), source=str(folder))
    models = Models([place], ttl=options.sleep_idle_seconds)
    models.load(place)
    off = {"/slots": options.no_slots, "/metrics": not options.metrics, "/": options.no_ui}
    app = make_app(
        Server(models, worker),
        keys=[Key(options.api_key)] if options.api_key else [],
        off=[path for path, is_off in off.items() if is_off],
    )
    host: Any = options.host.split(",")
    uvicorn.run(Renamed(app, options), host=host, port=options.port, log_level="warning")  # type: ignore[arg-type]


def only_health(options: argparse.Namespace) -> None:
    """Answers every GET request with status 200, and nothing else."""

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ok"}')

    HTTPServer((options.host, options.port), Healthy).serve_forever()


def main(arguments: list[str]) -> None:
    options, unknown = flags().parse_known_args(arguments)
    if unknown:
        print(unknown, file=sys.stderr)  # these flags have no counterpart
    folder = Path(os.environ["SHIM_MODELS"]) / (options.hf_repo or "none").rpartition("/")[2]
    serve(options, folder) if folder.is_dir() else only_health(options)
