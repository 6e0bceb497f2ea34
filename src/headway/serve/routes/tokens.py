"""Text to tokens and back, as vLLM and llama.cpp have it."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from pydantic import Field

from headway.errors import ConfigError
from headway.serve.bodies import Chat, ChatMessage, ModelRequest
from headway.serve.chats import rendered
from headway.serve.errors import warned
from headway.serve.served import Decoding
from headway.serve.server import Server
from headway.text import Tokenizer


class Tokenize(ModelRequest):
    """`POST /tokenize`: a text, as vLLM (`prompt`) or llama.cpp (`content`) call it, or a conversation."""

    prompt: str | None = None
    content: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    add_special: bool = False
    parse_special: bool = True
    return_token_strs: bool = False
    with_pieces: bool = False

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """Control tokens that stand in a `prompt` are text, as in completions. Raises ConfigError where there is
        neither."""
        if self.content is not None:
            return tokenizer.encode(self.content, bos=self.add_special, eos=False, special=self.parse_special)
        if self.prompt is None:
            raise ConfigError("tokenize: give prompt (or content, as llama.cpp calls it), or messages")
        return tokenizer.encode(self.prompt, bos=self.add_special_tokens, eos=False)


class Detokenize(ModelRequest):
    """`POST /detokenize`: ids."""

    tokens: list[int]


def routes(server: Server) -> APIRouter:
    """`/tokenize`, `/detokenize`, `/tokenizer_info`, `/apply-template`."""
    router = APIRouter()

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
        """The text of ids, by both names."""
        model, warnings = await server.begin(body, Decoding)
        text = model.lm.need_tokenizer().decode(body.tokens, special=True)
        return {"prompt": text, "content": text, **warned(warnings)}

    @router.get("/tokenizer_info")
    async def info(model: str | None = None) -> dict[str, Any]:
        """Special tokens and the chat template, as vLLM tells them."""
        tokenizer = (await server.models.find(model, Decoding)).lm.need_tokenizer()
        ids = {f"{role}_token": getattr(tokenizer, role) for role in ("bos", "eos", "pad")}
        named = {name: None if i is None else tokenizer.token(i) for name, i in ids.items()}
        template = tokenizer.chat_template
        return {**named, "chat_template": None if template is None else template.source}

    @router.post("/apply-template")
    async def apply_template(body: Chat) -> dict[str, Any]:
        """The text of the ids that a conversation is."""
        model, warnings = await server.begin(body, Decoding)
        text = model.lm.need_tokenizer().decode(await rendered(model, body, warnings), special=True)
        return {"prompt": text, **warned(warnings)}

    return router


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """What a token spells: text, or bytes that are none."""
    spelled = tokenizer.text_bytes(token, special=True) or b""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return list(spelled)
