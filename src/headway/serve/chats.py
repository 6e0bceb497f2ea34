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
    chat.check()
    model, warnings = await server.begin(asked, Decoding)
    return Conversation(model, model.texts([await rendered(model, chat)], chat.config(), chat.n), warnings)


async def rendered(model: Decoding, chat: Chat) -> list[int]:
    """Ids of a conversation, by the model's chat template. Raises DataError where it has none."""
    messages = [message.plain() for message in chat.messages]
    return await asyncio.to_thread(model.lm.need_tokenizer().render_chat, messages)
