"""Engines of a tensor-parallel model: rank 0 schedules, the other ranks read what it sends them."""

import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from threading import Thread
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from headway.errors import ConfigError
from headway.generate import Engine, GenerationConfig, ModelDraft, NgramDraft, Reader, generate
from headway.generate.loop import OpenEngine
from headway.generate.ranks import led, reader_of
from headway.generate.requests import Request
from headway.models import Decoder, EncoderDecoder, build
from headway.models.tensor_parallel import shard
from headway.parallel import DistributedExchange, Exchange, TensorParallel
from headway.patterns import Causal, PerHead, Window
from tests.generate.conftest import small
from tests.generate.engines import MODELS, drain, ids_of, used
from tests.generate.test_adapters import with_adapters
from tests.generate.test_many_requests import request, text
from tests.models.test_encoder import seq2seq
from tests.parallel.simulation import simulate

KINDS: dict[str, Callable[[], Decoder | EncoderDecoder]] = {
    "full": lambda: with_adapters(MODELS["full"]),
    "windows": lambda: MODELS["windows"],
    "heads": lambda: small(PerHead(*[Window.last(9)] * 2, *[Causal()] * 2), context=512),
    "linear": lambda: MODELS["linear"],
    "encoder-decoder": lambda: build(seq2seq(), seed=5).eval(),  # type: ignore[return-value]
}


def shared(model: Decoder | EncoderDecoder, exchange: Exchange) -> Any:
    copied = deepcopy(model).double()
    shard(copied, TensorParallel(exchange))
    return copied


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind == "windows" else ()) for kind in KINDS]
)
def test_texts_are_those_of_one_process(kind: str) -> None:
    """Sampled texts and beam searches, with stored prefixes, prompts in pieces and preempted requests."""
    whole, draw = KINDS[kind](), Random(3)
    common = [draw.randrange(whole.spec.vocab) for _ in range(150)]
    requests = [request(whole, draw, number, common) for number in range(12)]
    if isinstance(whole, Decoder):  # several texts that grow together
        long = GenerationConfig(max_new_tokens=90)
        requests += [Request(number, [*common[:60], number], long, 90) for number in range(20, 24)]
    expected = [text(each) for each in requests]
    engine = Engine(reader_of(deepcopy(whole).double()))
    for each in expected:
        engine.add(each)
    drain(engine)
    back = 0

    def body(model: Any) -> list[list[int]]:
        nonlocal back
        reader = reader_of(model, budget=7 * sum(kind.nbytes for kind in Reader(model).cache.pool.classes))
        engine, texts = Engine(reader, step_tokens=50), [text(each) for each in requests]
        preempt = engine._preempt

        def counted() -> None:
            nonlocal back
            back += 1
            preempt()

        engine._preempt = counted  # type: ignore[method-assign]
        for each in texts:
            engine.add(each)
            engine.step()
        drain(engine)
        assert used(engine) == 0
        return [ids_of(each) for each in texts]

    def rank(exchange: Exchange) -> Any:
        model = shared(whole, exchange)
        return led(model, lambda: body(model))

    first, second = simulate(2, rank)
    assert second is None
    assert first == [ids_of(each) for each in expected]
    assert back > 0 or kind in ("linear", "encoder-decoder")


def test_each_rank_keeps_its_own_heads() -> None:
    whole = MODELS["full"]

    def rank(exchange: Exchange) -> int:
        return reader_of(shared(whole, exchange)).cache.pool.classes[0].nbytes

    assert simulate(2, rank) == [reader_of(deepcopy(whole).double()).cache.pool.classes[0].nbytes // 2] * 2


def test_calls_one_after_the_other_and_from_several_threads() -> None:
    """Open engines, too, and with pauses between calls that are longer than a beat."""
    whole, prompts = MODELS["windows"], [[*range(70)], [5, 6], [*range(70), 9]]
    config = GenerationConfig(max_new_tokens=7, prefix_cache=True)
    double = deepcopy(whole).double()
    expected = [generation.ids for generation in generate(double, prompts, config)]

    def body(model: Decoder) -> list[list[int]]:
        opened, results = OpenEngine(), [list[int]()] * 3

        def call(i: int) -> None:
            results[i] = generate(model, [prompts[i]], config, requests=[i], engine=opened)[0].ids

        threads = [Thread(target=call, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sleep(0.05)
        assert [generation.ids for generation in generate(model, prompts, config)] == expected
        return results

    def rank(exchange: Exchange) -> Any:
        model = shared(whole, exchange)
        return led(model, lambda: body(model), beat=0.01)

    assert simulate(2, rank) == [expected, None]


def test_what_fails_on_rank_0_fails_there_alone() -> None:
    whole = MODELS["full"]

    def body(model: Decoder) -> list[int]:
        with pytest.raises(ConfigError, match="led: this model is led already"):
            led(model, lambda: None)
        with pytest.raises(ConfigError, match=r"exact: .* all weights on the CPU, in one dtype"):
            reader_of(model, exact=True)
        return generate(model, [[1, 2]], GenerationConfig(max_new_tokens=3))[0].ids

    def fails(model: Decoder) -> None:
        generate(model, [[1, 2]], GenerationConfig(max_new_tokens=3))
        raise KeyError("of the body")

    def rank(exchange: Exchange) -> Any:
        model, raised = shared(whole, exchange), False
        try:
            led(model, lambda: fails(model))
        except KeyError:
            raised = True
        return raised, led(model, lambda: body(model))

    expected = generate(deepcopy(whole).double(), [[1, 2]], GenerationConfig(max_new_tokens=3))[0].ids
    assert simulate(2, rank) == [(True, expected), (False, None)]


def test_rank_0_says_that_it_is_there() -> None:
    def rank(exchange: Exchange) -> int:
        sent, start = list[int](), exchange.start

        def counted(*arguments: Any) -> Callable[[], None]:
            sent.append(arguments[1])
            return start(*arguments)

        model = shared(MODELS["full"], exchange)
        exchange.start = counted  # type: ignore[method-assign]
        led(model, lambda: sleep(0.2), beat=0.01)
        return len(sent)

    count, _ = simulate(2, rank)
    assert count > 3 * 2


def test_a_draft_is_read_by_rank_0_alone() -> None:
    """The draft is n-grams or a model that is not sharded; a sharded draft model is refused."""
    whole, prompts = MODELS["full"], [[1, 2, 3, 1, 2], [7]]
    config = GenerationConfig(max_new_tokens=12)
    small_one = deepcopy(small(Causal(), context=512)).double()
    expected = [generation.ids for generation in generate(deepcopy(whole).double(), prompts, config)]

    def body(model: Decoder) -> None:
        with pytest.raises(ConfigError, match="the model is sharded"):
            ModelDraft(model=model)
        for draft in (NgramDraft(tokens=3, least=1), ModelDraft(model=small_one)):
            assert [
                generation.ids for generation in generate(model, prompts, config, draft=draft)
            ] == expected

    def rank(exchange: Exchange) -> Any:
        model = shared(whole, exchange)
        return led(model, lambda: body(model))

    simulate(2, rank)


def process(rank: int, ranks: int, folder: str, expected: list[list[int]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    try:
        model = shared(MODELS["windows"], DistributedExchange())
        texts = led(model, lambda: generate(model, PROMPTS, GenerationConfig(max_new_tokens=7)))
        assert (texts is None) if rank else ([generation.ids for generation in texts or []] == expected)
    finally:
        dist.destroy_process_group()


PROMPTS = [[*range(70)], [5, 6]]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="gloo over file:// is for POSIX")
def test_two_processes_over_gloo(tmp_path: Path) -> None:
    double = deepcopy(MODELS["windows"]).double()
    expected = [
        generation.ids for generation in generate(double, PROMPTS, GenerationConfig(max_new_tokens=7))
    ]
    start_processes(process, (2, str(tmp_path), expected), 2, start_method="spawn")  # type: ignore[no-untyped-call]


def test_a_model_of_one_process_is_led_by_it() -> None:
    assert led(MODELS["full"], lambda: 5) == 5


def test_broken_weights_of_one_rank_end_the_text_with_its_error() -> None:
    def rank(exchange: Exchange) -> Any:
        model = shared(MODELS["full"], exchange)
        if exchange.rank == 1:
            with torch.no_grad():
                next(p for name, p in model.named_parameters() if "o_proj" in name).fill_(float("nan"))

        def body() -> str:
            broken = text(request(MODELS["full"], Random(1), 0, [1, 2]))
            engine = Engine(reader_of(model))
            engine.add(broken)
            drain(engine)
            return str(broken.error)

        return led(model, body)

    first, _ = simulate(2, rank)
    assert "not numbers" in first
