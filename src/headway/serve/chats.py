"""Conversations that are to be answered, in whichever protocol they came: each is the body of a chat completion."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from headway.generate.sequences import SampledText
from headway.serve.bodies import Chat, TextRequest
from headway.serve.parts import PartReader, PlainReader
from headway.serve.served import Decoding
from headway.serve.server import Server


@dataclass(frozen=True)
class Conversation:
    """The texts that answer a conversation, what is to be said of the request's fields, and what divides a text into
    its parts."""

    model: Decoding
    texts: list[SampledText]
    warnings: list[str]
    reader: Callable[[], PartReader] = PlainReader


async def begin(server: Server, chat: Chat, asked: TextRequest) -> Conversation:
    """The texts of a chat; `asked` is the request as it came. Raises as `Server.begin` and `Decoding.texts`."""
    model, warnings = await server.begin(asked, Decoding)
    ids = await rendered(model, chat, warnings)
    return Conversation(model, model.texts([ids], chat.config(), chat.n), warnings)


async def rendered(model: Decoding, chat: Chat, warnings: list[str]) -> list[int]:
    """Ids of a conversation, by the model's chat template; adds to the warnings what it does not know. Raises DataError
    where it has none, ConfigError as `Chat.check`."""
    chat.check()
    tokenizer, variables = model.lm.need_tokenizer(), chat.variables
    source = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
    warnings += [
        f"{name}: the chat template knows none; it changes nothing"
        for name in variables
        if name not in source
    ]
    messages = [message.plain() for message in chat.messages]
    return await asyncio.to_thread(tokenizer.render_chat, messages, **variables)
