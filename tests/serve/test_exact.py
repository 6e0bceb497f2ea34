"""What HTTP answers to many clients at once is what `LanguageModel.generate` makes of each request alone."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from headway.api import LanguageModel, load
from headway.models.quantize import quantize_model
from headway.serve.grammar import Grammars
from tests.serve.conftest import Decoding as Served
from tests.serve.conftest import House, Models, Worker, placed, running, talker
from tests.serve.operation import api, command

openai = pytest.importorskip("openai")

CLIENTS = 16
COMMON = "the cat sat on the mat and the cat sat still, " * 3
"""The beginning of some prompts, so that the KV cache stored for other requests is used."""


def drawn(number: int) -> dict[str, Any]:
    """Returns a request with many settings, in the fields of `POST /v1/completions`."""
    draw = Random(number)
    prompt = draw.choice(["", COMMON]) + "".join(
        draw.choice("the cat sat ") for _ in range(draw.randint(3, 90))
    )
    return {
        "prompt": prompt,
        "max_tokens": draw.randint(1, 24),
        "temperature": draw.choice([0, 0.7, 1.3]),
        "top_p": draw.choice([1, 0.9]),
        "top_k": draw.choice([0, 5]),
        "min_p": draw.choice([0, 0.05]),
        "seed": draw.randrange(1 << 31),
        "n": draw.choice([1, 1, 3]),
        "stop": draw.choice([None, ["e"], ["a", "th"]]),
        "logprobs": draw.choice([None, 0, 2]),
        "logit_bias": draw.choice([{}, {"40": 5.0, "41": -100.0}]),
        "repetition_penalty": draw.choice([1, 1.2]),
        "frequency_penalty": draw.choice([0, 0.5]),
        "presence_penalty": draw.choice([0, -0.3]),
        "stream": draw.random() < 0.5,
        "structured_outputs": draw.choice([None, None, None, *FORMATS]),
    }


FORMATS: list[dict[str, Any]] = [
    {"regex": "(the|cat|sat| )+"},
    {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 1}},
    {"choice": ["the cat", "the mat"]},
]


RENAMED = {"max_tokens": "max_new_tokens", "logprobs": "top_log_probs", "logit_bias": "bias"}


@cache
def grammars(lm: LanguageModel) -> Grammars:
    return Grammars(lm.need_tokenizer(), lm.spec.vocab, lm.eos)


def alone(lm: LanguageModel, request: dict[str, Any], exact: bool) -> list[tuple[str, str, list[float]]]:
    """Returns texts, finish reasons and log-probabilities of a request, by `LanguageModel.generate`."""
    left_out = {"prompt", "n", "stream", "structured_outputs"}
    options = {RENAMED.get(name, name): value for name, value in request.items() if name not in left_out}
    options |= {"log_probs": request["logprobs"] is not None, "top_log_probs": request["logprobs"] or 0}
    options |= {"bias": {int(token): added for token, added in request["logit_bias"].items()}, "exact": exact}
    if form := request["structured_outputs"]:
        options["grammar"] = grammars(lm).compile(*next(iter(form.items())))
    generations = lm.generate(
        [request["prompt"]] * request["n"], **{**options, "stop": request["stop"] or ()}
    )
    reasons = {"eos": "stop"}
    return [
        (text.text, reasons.get(text.finish_reason, text.finish_reason), [*text.log_probs])
        for text in generations
    ]


async def told(client: Any, request: dict[str, Any]) -> list[tuple[str, str, list[float]]] | None:
    """Returns the same as `alone`, over HTTP; None for a request that the client gives up."""
    ours = "top_k", "min_p", "repetition_penalty", "structured_outputs"
    extra = {name: request[name] for name in ours if request[name] is not None}
    usual = {name: value for name, value in request.items() if name not in ours}
    answer = await client.completions.create(model="small", extra_body=extra, **usual)
    texts: list[tuple[str, str, list[float]]] = [("", "", []) for _ in range(request["n"])]

    def add(choice: Any) -> None:
        text, _, values = texts[choice.index]
        values += choice.logprobs.token_logprobs if choice.logprobs else []
        texts[choice.index] = text + choice.text, choice.finish_reason, values

    if not request["stream"]:
        for choice in answer.choices:
            add(choice)
        return texts
    leaves = Random(request["seed"]).random() < 0.3
    async for chunk in answer:
        for choice in chunk.choices:
            add(choice)
        if leaves:
            await answer.close()
            return None
    return texts


async def ask_all(url: str, requests: list[dict[str, Any]]) -> list[Any]:
    """Returns the answers to all requests, of which at most CLIENTS are sent at once."""
    room = asyncio.Semaphore(CLIENTS)

    async def ask_one(request: dict[str, Any]) -> Any:
        async with room:
            return await told(client, request)

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return await asyncio.gather(*map(ask_one, requests))


def compare(url: str, lm: LanguageModel, count: int, *, exact: bool, seed: int = 0) -> None:
    requests = [drawn(seed + number) for number in range(count)]
    answers = asyncio.run(ask_all(url, requests))
    assert 0 < sum(answer is None for answer in answers) < count / 2
    for request, answer in zip(requests, answers, strict=True):
        if answer is None:
            continue
        for (text, reason, log_probs), (expected_text, expected_reason, expected_log_probs) in zip(
            answer, alone(lm, request, exact), strict=True
        ):
            assert (text, reason) == (expected_text, expected_reason), request
            assert log_probs == (
                expected_log_probs if exact else pytest.approx(expected_log_probs, abs=5e-5)
            ), request


def in_bf16(lm: LanguageModel) -> None:
    lm.model.to(torch.bfloat16)


def in_int8(lm: LanguageModel) -> None:
    lm.model.to(torch.bfloat16)
    quantize_model(lm.model, "int8")


KINDS: dict[str, tuple[Callable[[LanguageModel], None], bool]] = {
    "float32": (lambda lm: None, False),
    "bf16, exact": (in_bf16, True),
    "int8, exact": (in_int8, True),
}


@contextmanager
def house_of(kind: str) -> Iterator[tuple[House, LanguageModel, bool]]:
    change, exact = KINDS[kind]
    lm, worker = talker(), Worker()
    change(lm)
    models = Models(placed(Served("small", lm, worker, keep=1 << 24, exact=exact)))
    with running(models, worker) as house:
        yield house, lm, exact


LEFT = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <async_generator:pytest.PytestUnraisableExceptionWarning"
)
"""These warnings come from the client: httpx' generators below a closed stream end when they are collected."""

LONG = [pytest.mark.slow, pytest.mark.timeout(3600)]


@LEFT
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *((kind, 20) for kind in KINDS),
        *(pytest.param(kind, 2000, marks=LONG) for kind in KINDS),
    ],
)
def test_many_at_once_are_those_of_one_after_the_other(kind: str, count: int) -> None:
    with house_of(kind) as (house, lm, exact):
        compare(house.url, lm, count, exact=exact)
        deadline = time.monotonic() + 10
        while house.used() or house.worker.count:  # requests of clients that left are still ending
            assert time.monotonic() < deadline
            time.sleep(0.01)


@LEFT
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--exact",)])
def test_the_command_answers_the_same(tmp_path: Path, options: tuple[str, ...]) -> None:
    talker().save(tmp_path / "small")
    with command(tmp_path / "small", *options) as (_, printed):
        compare(
            api(printed).removesuffix("/v1"),
            load(tmp_path / "small", task="causal-lm"),
            50,
            exact=bool(options),
            seed=10_000,
        )
