"""Every peer gives headway's result: at toy size here, at full size before each row is timed."""

from dataclasses import replace

import pytest
import torch

from headway.attention import attend
from headway.patterns import Causal, Window, visible
from headway.tokens import Tokens
from headway_lab.bench.attention import build, measure
from headway_lab.bench.cases import CASES, FORWARD, TRAIN, Case
from headway_lab.bench.inputs import OURS, UnsupportedCase, fastest, make, tokens_of
from headway_lab.bench.measure import TOLERANCE, Effort, difference, drop_mismatches
from headway_lab.bench.peers import chunked, chunks, flex, mask, sdpa
from headway_lab.bench.subprocess_runner import SubprocessRunner
from tests.naive import naive, with_gradients

TOKENS = 96


def toy(case: Case) -> Case:
    """Returns the case at a size for tests."""
    small = case.at(TOKENS)
    return replace(small, heads=4, kv_heads=4) if small.heads == small.kv_heads else small


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_every_peer_gives_what_headway_gives(case: Case) -> None:
    case = toy(case).with_peers([peer for peer in case.peers if peer != "flex"])
    for dtype in case.dtypes:
        for direction in case.passes:
            problem = build(case, dtype, direction)
            expected = {OURS, *case.peers, *([f"{OURS} {case.against}"] if case.against else [])}
            assert set(problem.sides) == expected, problem.notes
            drop_mismatches(problem, dtype)
            assert set(problem.sides) == expected, problem.notes
            assert problem.notes == []
            assert problem.work > 0


@pytest.mark.slow
def test_compiled_flex_attention_gives_what_headway_gives() -> None:
    """In a process of its own, so that compiler warnings do not fail the test."""
    effort = Effort(repeats=1, least=1, sample=0.0)
    with SubprocessRunner() as runner:
        for name in ("window", "window-around", "dilated"):
            case = toy(CASES[name]).with_peers(["flex"])
            row = runner.call(measure, case, "float32", FORWARD, "auto", effort)
            assert "flex" in row.ratios, row.notes
            assert "flex" not in runner.call(measure, case, "float32", TRAIN, "auto", effort).ratios


@pytest.mark.parametrize("backend", ["dense", "banded"])
def test_the_backend_that_is_named_is_the_one_that_runs(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = []

    def watch(*args, **kwargs):  # type: ignore[no-untyped-def]
        backends.append(kwargs["backend"])
        return attend(*args, **kwargs)

    monkeypatch.setattr("headway_lab.bench.attention.attend", watch)
    for name in ("window", "decode-4", "decode-4-int8"):
        build(toy(CASES[name]).with_peers([]), "float32", FORWARD, backend).sides[OURS]()
    assert backends == [backend] * 3


@pytest.mark.parametrize(
    "window", [Window.last(32), Window.around(16), Window(5, 9), Window.last(1)], ids=str
)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("joined", [False, True])
def test_chunks_equal_plain_attention_with_gradients(window: Window, kv_heads: int, joined: bool) -> None:
    for n in (64, 65, 130):
        case = replace(
            CASES["causal"], pattern=window, tokens=n, heads=4, kv_heads=kv_heads, width=8, batch=2
        )
        at, tokens = make(case, "float32", TRAIN), Tokens.range(n)
        arguments = (at.grad.double(), at.q.double(), at.k.double(), at.v.double())
        exact = with_gradients(lambda q, k, v, t=tokens: naive(q, k, v, window, t, t), *arguments)
        for size in (8, 16, 40, 64):
            actual = at.run(chunked(at.q, at.k, at.v, window, size, joined))()
            for result, truth in zip(actual, exact, strict=True):
                torch.testing.assert_close(result.double(), truth, rtol=0, atol=2e-5)


def test_useful_work_counts_the_pairs_that_are_seen() -> None:
    for case in (toy(case) for case in CASES.values() if case.kind == "attention"):
        at = make(case, "float32", FORWARD)
        seen = visible(case.pattern, at.tokens, at.tokens).sum().item()
        rows = case.batch if at.tokens.rows == 1 else 1
        assert at.flops == 4 * case.width * case.heads * rows * seen
        assert make(case, "float32", TRAIN).flops == 3.5 * at.flops


def test_another_case_stands_beside_for_as_many_pairs() -> None:
    case = CASES["packed"].at(TOKENS)
    problem = build(case, "float32", FORWARD)
    seen = visible(case.pattern, tokens_of(case), tokens_of(case)).sum().item()
    assert problem.scale == pytest.approx({"headway causal": seen / (TOKENS * (TOKENS + 1) / 2)})
    assert build(CASES["grouped"].at(TOKENS), "float32", FORWARD).scale == {"headway window": 1.0}, (
        "there it is time that counts"
    )


def test_a_peer_says_what_it_does_not_support() -> None:
    window = make(CASES["window"].at(64), "float32", FORWARD)
    packed = make(CASES["packed"].at(64), "float32", FORWARD)
    dilated = make(CASES["dilated"].at(64), "float32", FORWARD)
    for build_peer, at in (
        (sdpa, window),
        (sdpa, packed),
        (mask, packed),
        (chunks, dilated),
        (chunks, packed),
    ):
        with pytest.raises(UnsupportedCase):
            build_peer(at)
    long = replace(window, case=replace(window.case, tokens=8193))
    with pytest.raises(UnsupportedCase, match="8193 x 8193"):
        mask(long)
    with pytest.raises(UnsupportedCase, match="no backward"):
        flex(make(CASES["window"].at(64), "float32", TRAIN))


def test_layouts_are_what_they_are_called() -> None:
    packed, ragged = tokens_of(CASES["packed"]), tokens_of(CASES["ragged"])
    assert packed.documents.unique().numel() == 5
    assert bool(packed.valid.all())
    assert len({int(row.sum()) for row in ragged.valid}) == 4
    assert int(tokens_of(CASES["global"]).globals.sum()) == 16


def test_the_fastest_is_found() -> None:
    spent = []

    def run(steps: int):  # type: ignore[no-untyped-def]
        return lambda: spent.append(sum(range(steps)))

    assert fastest([3_000_000, 10, 2_000_000], run) == 10


def test_decoding_reads_another_cache_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def watch(q, k, v, pattern, **rest):  # type: ignore[no-untyped-def]
        assert pattern == Causal()
        assert rest["q_tokens"].index.item() == TOKENS - 1
        read.append(k.data_ptr())
        return q

    monkeypatch.setattr("headway_lab.bench.attention.attend", watch)
    problem = build(CASES["decode-4"].at(TOKENS), "bfloat16", FORWARD)
    for _ in range(4):
        problem.sides[OURS]()
    assert len(set(read)) == 4
    assert problem.work == 2 * 4 * TOKENS * 128 * 2


def test_int8_decoding_counts_bytes_and_scales_and_stands_beside_the_same_numbers() -> None:
    case = CASES["decode-4-int8"].at(TOKENS)
    problem = build(case, "bfloat16", FORWARD)
    assert set(problem.sides) == {OURS, *case.peers, "headway decode-4"}
    assert problem.work == 2 * 4 * TOKENS * (128 + 4)
    expected = problem.sides["headway decode-4"]()[0]
    for name, side in problem.sides.items():
        if name != "headway decode-4":
            assert difference(side()[0], expected) < TOLERANCE["bfloat16"], name
