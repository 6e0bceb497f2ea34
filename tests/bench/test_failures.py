"""What is lost when a measurement fails: its own figure alone."""

import asyncio
from typing import NoReturn

import pytest
import torch

from headway.errors import BackendError
from headway_lab.bench.client import Ask, run
from headway_lab.bench.inputs import OURS, Problem
from headway_lab.bench.measure import QUICK, measured


def test_a_row_keeps_its_times_where_memory_cannot_be_measured() -> None:
    def fails(side: str) -> NoReturn:
        raise BackendError("the measuring process was killed")

    problem = Problem(sides={OURS: lambda: (torch.ones(1),)}, work=1.0, peak=fails)
    row = measured("train", "case", "float32", lambda: problem, QUICK)
    assert row.ours_ms is not None
    assert row.notes == ["memory not measured: the measuring process was killed"]


def test_an_answer_without_text_is_an_error_of_the_request() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}}")
        usage = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n\n'
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + usage)
        writer.close()

    async def asked() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            await run(server.sockets[0].getsockname()[1], [Ask({})], 1)

    with pytest.raises(ValueError, match="cut off before its text or its usage"):
        asyncio.run(asked())
