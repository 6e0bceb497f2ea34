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
from headway.serve.tools import Prepared


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
    prepared = await prepare(model, chat, warnings)
    config = chat.config(grammar=await model.grammar(*prepared.grammar), shown=prepared.shown)
    texts = model.texts([prepared.ids], config, chat.n)
    return Conversation(model, texts, warnings, prepared.reader)


async def rendered(model: Decoding, chat: Chat, warnings: list[str]) -> list[int]:
    """The ids of a conversation; see `prepare`."""
    return (await prepare(model, chat, warnings)).ids


async def prepare(model: Decoding, chat: Chat, warnings: list[str]) -> Prepared:
    """A conversation, and its ids by the model's chat template; adds to the warnings what that does not know. Raises
    DataError where there is none, ConfigError as `Chat.check` and `Prepared`."""
    chat.check()
    prepared = Prepared(chat, model.lm.need_tokenizer())
    warnings += prepared.warnings
    await asyncio.to_thread(lambda: prepared.ids)
    return prepared
