"""Routes of llama.cpp and vLLM about tokens, and about the server."""

import asyncio
from typing import Any

from fastapi import APIRouter
from pydantic import Field

from headway import __version__
from headway.errors import ConfigError
from headway.serve.bodies import Chat, ChatMessage, ModelRequest
from headway.serve.chats import prepare
from headway.serve.errors import warned
from headway.serve.llama import LlamaCompletion
from headway.serve.served import Decoding
from headway.serve.server import Server
from headway.text import Tokenizer


class Tokenize(ModelRequest):
    """`POST /tokenize`: a text, in the field of vLLM (`prompt`) or of llama.cpp (`content`), or a conversation."""

    prompt: str | None = None
    content: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    add_special: bool = False
    parse_special: bool = True
    return_token_strs: bool = False
    with_pieces: bool = False

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """Returns the token ids of the text; control tokens in a `prompt` are plain text, as in completions."""
        if self.content is not None:
            return tokenizer.encode(self.content, bos=self.add_special, eos=False, special=self.parse_special)
        return tokenizer.encode(self.prompt or "", bos=self.add_special_tokens, eos=False)


class Detokenize(ModelRequest):
    """`POST /detokenize`: token ids."""

    tokens: list[int]


def routes(server: Server) -> APIRouter:
    """Returns the routes `/tokenize`, `/detokenize`, `/apply-template`, `/tokenizer_info`, `/props`, `/slots`."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: Tokenize) -> dict[str, Any]:
        """Returns the token ids of a text or a conversation. Raises ConfigError unless exactly one is given."""
        if [body.prompt, body.content, body.messages].count(None) != 2:
            raise ConfigError("tokenize takes one of prompt, content (llama.cpp's name for it) and messages")
        model, warnings = await server.begin(body, Decoding)
        tokenizer = model.lm.need_tokenizer()
        if body.messages is not None:
            ids = (await prepare(model, Chat.model_validate({"messages": body.messages}), warnings)).ids
        else:
            ids = await asyncio.to_thread(body.ids, tokenizer)
        answer = {"count": len(ids), "max_model_len": model.context, "tokens": ids, **warned(warnings)}
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.token(i) for i in ids]
        if body.with_pieces:
            answer["tokens"] = [{"id": i, "piece": _piece(tokenizer, i)} for i in ids]
        return answer

    @router.post("/detokenize")
    async def detokenize(body: Detokenize) -> dict[str, Any]:
        """Returns the text of token ids, in the fields of vLLM and of llama.cpp."""
        model, warnings = await server.begin(body, Decoding)
        text = model.lm.need_tokenizer().decode(body.tokens, special=True)
        return {"prompt": text, "content": text, **warned(warnings)}

    @router.post("/apply-template")
    async def apply_template(body: Chat) -> dict[str, Any]:
        """Returns the prompt of a conversation as text, without the BOS that begins every prompt."""
        model, warnings = await server.begin(body, Decoding)
        ids, tokenizer = (await prepare(model, body, warnings)).ids, model.lm.need_tokenizer()
        text = tokenizer.decode(ids[ids[:1] == [tokenizer.bos] :], special=True)
        return {"prompt": text, **warned(warnings)}

    @router.get("/tokenizer_info")
    async def info(model: str | None = None) -> dict[str, Any]:
        """Returns the special tokens and the chat template, as vLLM does."""
        return _names((await server.models.find(model, Decoding)).lm.need_tokenizer())

    @router.get("/props")
    def props(model: str | None = None) -> dict[str, Any]:
        """Returns facts about a model and the default settings of requests; less about an unloaded model, which this
        does not load."""
        place = server.models.choose(model, lambda served: isinstance(served, Decoding))
        answer = {
            "model_alias": place.name,
            "model_path": place.source,
            "is_sleeping": place.model is None,
            "total_slots": server.worker.slots or server.worker.most,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"headway {__version__}",
        }
        if not isinstance(
            decoder := place.model, Decoding
        ):  # does not count as a use: the model may still expire
            return answer
        defaults = LlamaCompletion.model_validate({"prompt": ""}).model_dump(exclude={"prompt", "model"})
        answer["default_generation_settings"] = {"n_ctx": decoder.context, "params": defaults}
        return answer | _names(decoder.lm.need_tokenizer())

    @router.get("/slots")
    async def slots(model: str | None = None) -> list[dict[str, Any]]:
        """Returns an entry for each slot; without a limit of slots, one for each running request and one more. They
        hold no text."""
        context, worker = (await server.models.find(model, Decoding)).context, server.worker
        count = worker.count
        rows = range(worker.slots or min(count + 1, worker.most))
        return [{"id": i, "n_ctx": context, "is_processing": i < count} for i in rows]

    return router


def _names(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the special tokens and the chat template."""
    ids = {f"{role}_token": getattr(tokenizer, role) for role in ("bos", "eos", "pad")}
    template = tokenizer.chat_template
    named = {name: None if i is None else tokenizer.token(i) for name, i in ids.items()}
    return {**named, "chat_template": None if template is None else template.source}


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """Returns the text of a token, or its bytes if they are not valid UTF-8."""
    spelled = tokenizer.text_bytes(token, special=True) or b""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return list(spelled)
