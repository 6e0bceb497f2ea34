"""The engine: requests arrive, wait and are preempted, and each result equals the request's result alone."""

import threading
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

from headway.cache import PageTable
from headway.errors import ConfigError
from headway.generate import Beams, Engine, GenerationConfig, NgramDraft, Reader
from headway.generate.beams import BeamSearch
from headway.generate.sequences import SampledText
from headway.patterns import Causal, Pattern
from tests.generate.conftest import MIXED, small
from tests.generate.engines import MODELS, alone, drain, drawn, ids_of, text_of, used

DRAFT = NgramDraft(tokens=3, least=1)


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        pytest.param("windows", None, id="windows"),
        pytest.param("full", None, id="full"),
        pytest.param("linear", None, id="linear"),
        pytest.param("hybrid", None, id="hybrid", marks=pytest.mark.slow),
        pytest.param("windows", DRAFT, id="windows-drafts"),
        pytest.param("full", DRAFT, id="full-drafts", marks=pytest.mark.slow),
    ],
)
def test_requests_with_little_room_are_what_each_is_alone(name: str, draft: NgramDraft | None) -> None:
    """There is room for some of them: prompts in pieces, stored prefixes, preemption of the youngest, cancellations."""
    model, draw = MODELS[name], Random(2)
    common = [draw.randrange(330) for _ in range(200)]
    reader = Reader(model, slack=3 if draft else 0, budget=1)
    pool = reader.cache.pool
    pool.budget = ((4 if name == "windows" else 5) if draft else 8) * sum(
        kind.nbytes for kind in pool.classes
    )
    # a step of more than MOST_ROWS tokens runs through the modules, which have sums of their own to clear
    engine = Engine(reader, step_tokens=100 if name == "linear" else 50, draft=draft)
    waiting = [
        drawn(
            draw,
            n,
            common,
            130 if draft else 200,
            140 if draft else 60,
            draft is None and name in ("windows", "full"),
        )
        for n in range(24)
    ]
    added, cancelled, hits, sent_back = [], [], 0, 0
    open_text, preempt = reader.cache.open, engine._preempt

    def opened(*arguments: Any) -> PageTable:
        nonlocal hits
        table = open_text(*arguments)
        hits += len(table) > 0
        return table

    def back() -> None:
        nonlocal sent_back
        oldest, sent_back = engine.running[0], sent_back + 1
        preempt()
        assert engine.running[0] is oldest, "the oldest goes on"

    reader.cache.open, engine._preempt = opened, back  # type: ignore[method-assign, assignment]
    while waiting or not engine.is_idle:
        for _ in range(draw.randint(0, 3)):
            if waiting:
                added.append(waiting.pop())
                engine.add(added[-1])
        if added and draw.random() < 0.05:
            cancelled.append(draw.choice(added))
            engine.cancel(cancelled[-1])
        engine.step()
        assert pool.held <= (pool.budget or 0)
    for text in added:
        if text not in cancelled:
            assert ids_of(text) == alone(model, text), text.request
    assert hits > 3
    assert sent_back or name in ("linear", "hybrid")
    assert used(engine) == 0


def test_all_pages_are_free_when_all_have_ended() -> None:
    engine = Engine(Reader(MODELS["mixed"]))
    beams = GenerationConfig(max_new_tokens=5, beams=Beams(4))
    texts = [text_of(0, [1, 2], beams), text_of(1, [3], GenerationConfig(max_new_tokens=9))]
    for text in texts:
        engine.add(text)
    drain(engine)
    assert [ids_of(text) for text in texts] == [alone(MODELS["mixed"], text) for text in texts]
    assert (used(engine), engine.reader.cache.pool.held) == (0, 0)


def test_a_text_that_ends_and_a_beam_that_forks_copy_a_partial_page_at_most() -> None:
    """Each fork copies at most one page of each class; texts without forks copy none."""
    reader = Reader(MODELS["full"])
    engine = Engine(reader)
    for number in range(6):
        engine.add(text_of(number, [5] * 100, GenerationConfig(max_new_tokens=3 + number)))
    drain(engine)
    assert reader.cache.copied == 0
    forks, fork = [], reader.cache.pool.fork
    reader.cache.pool.fork = lambda table: forks.append(table) or fork(table)  # type: ignore[method-assign, func-returns-value]
    engine.add(text_of(9, [5] * 100, GenerationConfig(max_new_tokens=12, beams=Beams(3))))
    drain(engine)
    assert 0 < reader.cache.copied <= len(forks)


def test_a_step_reads_so_many_tokens_of_prompts() -> None:
    model, counts = small(MIXED), []
    model.register_forward_pre_hook(lambda module, args: counts.append(args[0].numel()))
    engine = Engine(Reader(model), step_tokens=10)
    for number, length in enumerate((25, 4, 8)):
        engine.add(text_of(number, [number + 1] * length, GenerationConfig(max_new_tokens=2)))
    drain(engine)
    assert counts[:4] == [10, 10, 10, 9], "25, 4 and 8 tokens, and the last ones of the first two"
    assert max(counts) <= 10 + 2


def test_a_step_beside_texts_that_are_written_reads_fewer() -> None:
    model, counts = small(MIXED), []
    model.register_forward_pre_hook(lambda module, args: counts.append(args[0].numel()))
    engine = Engine(Reader(model), step_tokens=10, beside=3)
    for number, length in enumerate((8, 6, 12, 4)):
        engine.add(text_of(number, [number + 1] * length, GenerationConfig(max_new_tokens=9)))
        if number == 1:
            engine.step()
    drain(engine)
    assert counts[0] == 10, "nothing is written yet: 8 and 2 of 6"
    # the last token of a prompt is read like a generated one: 4, then 12, then 4 in pieces of 3
    assert counts[1:8] == [1 + 3, 2 + 3, 2 + 3, 2 + 3, 2 + 3, 3 + 3, 4]


def test_beside_many_texts_a_step_reads_a_token_for_each() -> None:
    model, counts = small(MIXED), []
    model.register_forward_pre_hook(lambda module, args: counts.append(args[0].numel()))
    engine = Engine(Reader(model), beside=2)
    for number in range(5):
        engine.add(text_of(number, [number + 1] * 4, GenerationConfig(max_new_tokens=9)))
    engine.step()
    engine.add(text_of(5, [7] * 11, GenerationConfig(max_new_tokens=2)))
    drain(engine)
    assert counts[:4] == [20, 5 + 5, 5 + 5, 6]


def test_a_request_waits_until_there_is_room() -> None:
    reader = Reader(MODELS["full"], budget=1)
    reader.cache.pool.budget = 5 * reader.cache.pool.classes[0].nbytes
    engine = Engine(reader)
    texts = [text_of(number, [number] * 120, GenerationConfig(max_new_tokens=4)) for number in range(3)]
    engine._preempt = lambda: pytest.fail("taken in without room")  # type: ignore[method-assign]
    steps = engine.run(texts)
    next(steps)
    assert (len(engine.running), len(engine.waiting)) == (2, 1)
    steps.close()  # type: ignore[attr-defined]
    assert (used(engine), engine.is_idle) == (0, True)


def test_what_can_never_fit_is_refused() -> None:
    reader = Reader(MODELS["full"], budget=1)
    reader.cache.pool.budget = 2 * reader.cache.pool.classes[0].nbytes
    engine = Engine(reader)
    with pytest.raises(
        ConfigError, match=r"request 4 has up to 129 tokens, whose keys and values take \d+ bytes"
    ):
        engine.add(text_of(4, [1] * 120, GenerationConfig(max_new_tokens=9)))
    engine.add(text_of(5, [1] * 120, GenerationConfig(max_new_tokens=8)))
    drain(engine)


@pytest.mark.parametrize("patterns", [Causal(), MIXED], ids=["full", "mixed"])
def test_a_cancelled_request_leaves_the_others_alone(patterns: Pattern) -> None:
    model = small(patterns)
    engine = Engine(Reader(model))
    texts = [text_of(n, [n, n + 1], GenerationConfig(max_new_tokens=8)) for n in range(3)]
    for text in texts:
        engine.add(text)
    read, before = engine.reader.read, 0

    def cancelling(*arguments: object) -> torch.Tensor:
        nonlocal before
        logits = read(*arguments)  # type: ignore[arg-type]
        before = used(engine)
        engine.cancel(texts[1])
        assert used(engine) == before, "while its step is read"
        return logits

    engine.reader.read = cancelling  # type: ignore[method-assign]
    engine.step()
    assert used(engine) < before
    engine.reader.read = read  # type: ignore[method-assign]
    engine.cancel(text_of(7, [1], GenerationConfig()))
    drain(engine)
    assert [len(ids_of(text)) for text in texts] == [8, 1, 8]
    assert [ids_of(texts[n]) for n in (0, 2)] == [alone(model, texts[n]) for n in (0, 2)]
    assert used(engine) == 0


def test_texts_of_a_run_that_is_left_are_cancelled() -> None:
    model = MODELS["windows"]
    engine = Engine(Reader(model))
    texts = [text_of(n, [1, 2], GenerationConfig(max_new_tokens=3)) for n in range(3)]
    engine.add(texts[2])
    steps = engine.run(texts[:2], most=1)
    next(steps)
    assert len(engine.running) == 2, "one of this call"
    steps.close()  # type: ignore[attr-defined]
    assert [text.error for text in texts] == [None] * 3
    drain(engine)
    assert [len(ids_of(text)) for text in texts] == [1, 0, 3]
    assert used(engine) == 0


def test_threads_share_the_steps_of_an_engine() -> None:
    """Each thread runs its own texts, and one thread cancels a text; every other text equals its text alone."""
    model, most, errors = MODELS["mixed"], 0, []
    engine = Engine(Reader(model))
    texts = [
        [text_of(8 * thread + n, [thread, n], GenerationConfig(max_new_tokens=3 + n)) for n in range(5)]
        for thread in range(4)
    ]
    # so long that it has not ended when it is cancelled, though other threads may run steps until then
    texts[0][4] = text_of(4, [0, 4], GenerationConfig(max_new_tokens=200))
    begin, read = threading.Barrier(4), engine.reader.read

    def counting(chunks: Sequence[object], *rest: object) -> torch.Tensor:
        nonlocal most
        most = max(most, len(chunks))
        return read(chunks, *rest)  # type: ignore[arg-type]

    def work(thread_texts: list[SampledText | BeamSearch]) -> None:
        try:
            begin.wait()
            for step, _ in enumerate(engine.run(thread_texts)):
                if errors:
                    return
                if thread_texts is texts[0] and step == 1:
                    engine.cancel(thread_texts[4])
        except BaseException as error:  # reported by the test
            errors.append(error)

    engine.reader.read = counting  # type: ignore[method-assign, assignment]
    threads = [threading.Thread(target=work, args=(thread_texts,), daemon=True) for thread_texts in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    assert most > 5, "texts of several threads in one step"
    left = [text for thread_texts in texts for text in thread_texts if text is not texts[0][4]]
    assert [ids_of(text) for text in left] == [alone(model, text) for text in left]
    assert len(ids_of(texts[0][4])) < 200
    assert (used(engine), engine.is_idle) == (0, True)
