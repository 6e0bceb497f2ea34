"""llama.cpp's protocol, and vLLM's for tokens: completions, gaps that are filled, tokens, what the server is."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from headway import __version__
from headway.serve.bodies import Chat
from headway.serve.chats import rendered
from headway.serve.errors import warned
from headway.serve.llama import Detokenize, Infill, LlamaAnswer, LlamaCompletion, Tokenize
from headway.serve.served import Decoding
from headway.serve.server import Server
from headway.serve.streams import STREAMED, respond
from headway.text import Tokenizer


def routes(server: Server) -> APIRouter:
    """`/completion` (`/completions`), `/infill`, `/tokenize`, `/detokenize`, `/apply-template`, `/tokenizer_info`,
    `/props`, `/slots`."""
    router = APIRouter()

    async def write(body: LlamaCompletion, request: Request) -> Response:
        model, warnings = await server.begin(body, Decoding)
        ids = await asyncio.to_thread(body.ids, model.lm.need_tokenizer())
        room = None if model.context is None else max(0, model.context - max(map(len, ids), default=0))
        texts = model.texts(ids, await body.config(model, room))
        return await respond(LlamaAnswer(model, texts, warnings, body), request, stream=body.stream)

    @router.post("/completion", responses=STREAMED)
    @router.post("/completions", responses=STREAMED)
    async def complete(body: LlamaCompletion, request: Request) -> Response:
        """Continues prompts."""
        return await write(body, request)

    @router.post("/infill", responses=STREAMED)
    async def fill(body: Infill, request: Request) -> Response:
        """Fills the gap between two texts."""
        return await write(body, request)

    @router.post("/tokenize")
    async def tokenize(body: Tokenize) -> dict[str, Any]:
        """Ids of a text or a conversation."""
        model, warnings = await server.begin(body, Decoding)
        tokenizer = model.lm.need_tokenizer()
        if body.messages is not None:
            ids = await rendered(model, Chat.model_validate({"messages": body.messages}), warnings)
        else:
            ids = await asyncio.to_thread(body.ids, tokenizer)
        told = {"count": len(ids), "max_model_len": model.context, "tokens": ids, **warned(warnings)}
        if body.return_token_strs:
            told["token_strs"] = [tokenizer.token(i) for i in ids]
        if body.with_pieces:
            told["tokens"] = [{"id": i, "piece": _piece(tokenizer, i)} for i in ids]
        return told

    @router.post("/detokenize")
    async def detokenize(body: Detokenize) -> dict[str, Any]:
        """The text of ids, as vLLM and as llama.cpp call it."""
        model, warnings = await server.begin(body, Decoding)
        text = model.lm.need_tokenizer().decode(body.tokens, special=True)
        return {"prompt": text, "content": text, **warned(warnings)}

    @router.post("/apply-template")
    async def apply_template(body: Chat) -> dict[str, Any]:
        """The text of the ids that a conversation is."""
        model, warnings = await server.begin(body, Decoding)
        text = model.lm.need_tokenizer().decode(await rendered(model, body, warnings), special=True)
        return {"prompt": text, **warned(warnings)}

    @router.get("/tokenizer_info")
    async def info(model: str | None = None) -> dict[str, Any]:
        """Special tokens and the chat template, as vLLM tells them."""
        return _names((await server.models.find(model, Decoding)).lm.need_tokenizer())

    @router.get("/props")
    async def props(model: str | None = None) -> dict[str, Any]:
        """What a model is, and the settings that requests have unless they say otherwise."""
        found = await server.models.find(model, Decoding)
        defaults = LlamaCompletion.model_validate({"prompt": ""}).model_dump(exclude={"prompt", "model"})
        return {
            "default_generation_settings": {"n_ctx": found.context, "params": defaults},
            "total_slots": server.worker.most,
            "model_alias": found.name,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"headway {__version__}",
            **_names(found.lm.need_tokenizer()),
        }

    @router.get("/slots")
    async def slots(model: str | None = None) -> list[dict[str, Any]]:
        """A row for each request that is being written, and one for the next; nothing of what they say."""
        context, count = (await server.models.find(model, Decoding)).context, server.worker.count
        rows = range(min(count + 1, server.worker.most))
        return [{"id": i, "n_ctx": context, "is_processing": i < count} for i in rows]

    return router


def _names(tokenizer: Tokenizer) -> dict[str, Any]:
    """The names of special tokens, and the chat template."""
    ids = {f"{role}_token": getattr(tokenizer, role) for role in ("bos", "eos", "pad")}
    template = tokenizer.chat_template
    named = {name: None if i is None else tokenizer.token(i) for name, i in ids.items()}
    return {**named, "chat_template": None if template is None else template.source}


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """What a token spells: text, or bytes that are none."""
    spelled = tokenizer.text_bytes(token, special=True) or b""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return list(spelled)
