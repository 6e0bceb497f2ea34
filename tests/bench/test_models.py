"""Whole models beside their peers: the same weights, the same work, the same results."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import hardware
from headway.cli import run
from headway.models import ModelSpec, build, cost
from headway.nn import Linear
from headway.nn.weights.nf4 import nf4_bytes
from headway_lab.bench import decoders, llama_cpp, models, train
from headway_lab.bench.inputs import OURS, UnsupportedCase
from headway_lab.bench.measure import Effort, difference
from headway_lab.bench.models import DECODERS, WEIGHTS, Written, ids_of
from headway_lab.bench.subprocess_runner import SubprocessRunner, peak_of
from tests.bench import listed
from tests.listings import constants

ONCE = Effort(repeats=1, least=1, sample=0.0)
MIB = 1 << 20


@pytest.fixture
def without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaves as if the bindings were not installed."""

    def missing() -> Any:
        raise UnsupportedCase("llama-cpp-python is not installed")

    monkeypatch.setattr(llama_cpp, "llama_cpp", missing)


def test_a_step_reads_every_weight_once_and_of_the_embedding_its_rows(tmp_path: Path) -> None:
    written = Written("tiny", tmp_path)
    model, spec = written.ours("bf16"), DECODERS["tiny"]
    for rows in (1, 4):
        expected = cost.weight_bytes_read(spec, torch.bfloat16, rows)
        expected += cost.kv_bytes_read(spec, 48, torch.bfloat16, rows)
        assert decoders.step_bytes(model, 48, rows) == expected
    bits = {"int8": 8.5, "int4": 4.5, "int8-row": 8, "q4_K": 4.625, "q5_K": 5.625, "q6_K": 6.5625}
    matrices = cost.matrix_weights(spec) + spec.vocab * spec.width
    nf4_sizes = [nf4_bytes(m.matrix.numel()) for m in model.modules() if isinstance(m, Linear)]
    less = decoders.step_bytes(model, 48, 1) - decoders.step_bytes(written.ours("nf4"), 48, 1)
    assert less == cost.matrix_weights(spec) * 2 + spec.vocab * spec.width * 2 - sum(nf4_sizes)
    factors = 4 * sum(m.out_features for m in model.modules() if isinstance(m, Linear))
    for weights, width in bits.items():
        less = decoders.step_bytes(model, 48, 1) - decoders.step_bytes(written.ours(weights), 48, 1)
        row = 0 if weights == "int8-row" else spec.width * (16 - width) / 8 - 4 * ("K" not in weights)
        assert less == matrices * (16 - width) / 8 - factors * ("K" not in weights) + row


@pytest.mark.usefixtures("without_llama_cpp", "steady")
def test_rows_of_decoding_at_toy_size_are_as_listed() -> None:
    messages: list[str] = []
    rows = list(decoders.decode(["tiny"], list(WEIGHTS), [1, 2], 16, effort=ONCE, say=messages.append))
    assert [row.case for row in rows] == [
        f"tiny {weights} rows={n} context=16" for weights in WEIGHTS for n in (1, 2)
    ]
    for row in rows:
        weights, n = row.case.split()[1], int(row.case.split()[2].removeprefix("rows="))
        batched = {decoders.ONE_ROW} if n > 1 else set()
        assert set(row.peers) == batched | ({decoders.TRANSFORMERS} if weights == "bf16" else set())
        assert row.notes == [
            "llama.cpp: "
            + (
                f"GGUF has no type like {weights}"
                if WEIGHTS[weights] is None
                else "llama-cpp-python is not installed"
            )
        ]
        document = json.loads(row.to_line())
        assert document["tokens_per_second"] == pytest.approx(n / document["ours_ms"] * 1e3)
        assert document["ours_gbs"] == pytest.approx(document["bytes"] / document["ours_ms"] * 1e3 / 1e9)
        assert document["share_of_limit"] > 0
    listed.check("decode", [*messages, *listed.rows_of(rows), constants(decoders), constants(models)])


@pytest.mark.usefixtures("without_llama_cpp", "steady")
def test_rows_of_prefill_at_toy_size_are_as_listed() -> None:
    messages: list[str] = []
    rows = list(decoders.prefill(["tiny"], ["bf16", "int8"], 96, effort=ONCE, say=messages.append))
    assert messages == ["prefill tiny bf16 n=96", "prefill tiny int8 n=96"]
    assert [set(row.peers) for row in rows] == [{decoders.TRANSFORMERS}, {decoders.BF16}]
    for row in rows:
        document = json.loads(row.to_line())
        assert document["flops"] == cost.prefill_flops(DECODERS["tiny"], 96)
        assert document["tokens_per_second"] == pytest.approx(96 / document["ours_ms"] * 1e3)
    listed.check("prefill", listed.rows_of(rows))


def test_steps_stay_where_they_are_and_rows_are_alike(tmp_path: Path) -> None:
    """A call that is timed again and again must be the same step each time."""
    model = Written("tiny", tmp_path).ours("bf16")
    prompt = ids_of("tiny", 15)
    side = decoders.our_steps(model, prompt, 3)
    (first,) = side()
    first = first.clone()
    assert torch.equal(side()[0], first)
    with torch.no_grad():
        (whole,) = model(torch.tensor([[*prompt, prompt[-1]]]))
    assert difference(first, whole[-1:].expand(3, -1)) < decoders.APART_BF16


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_a_training_step_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    case = train.CASES["tiny-2x64"]
    if kind == "encoder":
        spec = ModelSpec.of(
            "bert", vocab=97, width=64, layers=2, heads=4, hidden=96, dropout=0.0, attention_dropout=0.0
        )
        case = train.Case(name="bert", spec=spec, rows=2, tokens=64)
    train.save_folder(tmp_path / "hf", build(case.spec, seed=0))
    for dtype in ("float32", "bfloat16"):
        loss, norm = train.step(case, dtype, OURS, tmp_path / "hf")()
        for side in (train.EAGER, train.WITHIN):
            theirs = train.step(case, dtype, side, tmp_path / "hf")()
            assert difference(theirs[0], loss) < train.APART[dtype] / 10
            assert difference(theirs[1], norm) < train.APART[dtype]
        passes = replace(case, trains=False)
        (alone,), (eager,) = (
            train.step(passes, dtype, side, tmp_path / "hf")() for side in (OURS, train.EAGER)
        )
        assert difference(alone, loss) < train.APART[dtype] / 10
        assert difference(eager, alone) < train.APART[dtype] / 10
        assert passes.flops == case.flops / 3


def test_products_of_a_step_count_the_head_for_targets_alone() -> None:
    bert, tiny = train.CASES["bert-base-8x512"], train.CASES["tiny-2x64"]
    assert (bert.batch()[1] >= 0).sum(1).tolist() == [bert.targets] * 8
    assert bert.targets == int(0.15 * 512)
    less = 8 * 512 * cost.train_flops(bert.spec, 512) - bert.flops
    assert less == 3 * 8 * (512 - bert.targets) * cost.head_flops(bert.spec)
    ids, targets = tiny.batch()
    assert torch.equal(targets[:, :-1], ids[:, 1:])
    assert (targets >= 0).sum().item() == 2 * tiny.targets


@pytest.mark.usefixtures("steady")
def test_rows_of_training_at_toy_size_are_as_listed() -> None:
    peers, messages = [train.EAGER, train.ALL_BF16, train.WITHIN], list[str]()
    (row,) = train.train(["tiny-2x64"], ["bfloat16"], peers, memory=False, effort=ONCE, say=messages.append)
    assert messages == ["train tiny-2x64 bfloat16"]
    assert set(row.peers) == {train.EAGER, train.ALL_BF16, train.WITHIN}, row.notes
    assert json.loads(row.to_line())["tokens_per_second"] == pytest.approx(128e3 / row.ours_ms)
    listed.check("train", [*listed.rows_of([row]), constants(train)])


def test_too_little_memory_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "memory_available", lambda: 1 << 20)
    with pytest.raises(UnsupportedCase, match=r"1.1b and its peers need 8.8 GB, but 0.0 GB are available"):
        _ = Written("1.1b", Path()).hf
    messages: list[str] = []
    decoding = decoders.decode(["1.1b"], ["int8"], [1], 16, effort=ONCE, say=messages.append)
    for row in (*decoding, *decoders.prefill(["1.1b"], ["bf16"], 16, effort=ONCE, say=messages.append)):
        assert (f"{row.bench} {row.case}", row.ours_ms) == (messages.pop(0), None)
        assert "not measured: 1.1b and its peers" in row.notes[0]


def test_names_that_do_not_exist_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "decode", "--model", "2b"]) == 1
    assert "no model '2b'; known: tiny, 32m, 1.1b" in capsys.readouterr().err
    assert run(["bench", "decode", "--weights", "int5"]) == 1
    assert "no kind of weights 'int5'" in capsys.readouterr().err
    assert run(["bench", "train", "--case", "32m"]) == 1
    assert "32m-8x512" in capsys.readouterr().err
    assert (
        run(
            ["bench", "prefill", "--model", "tiny", "--weights", "bf16", "--tokens", "8", "--quick", "--json"]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["case"] == "tiny bf16 n=8"


def _held(size: int) -> Any:
    """Returns a call that makes `size` bytes and forgets them, beside as many that are kept."""
    kept = torch.ones(size, dtype=torch.uint8)
    return lambda: torch.ones(size, dtype=torch.uint8).max() + kept[0]


def test_the_peak_of_a_call_is_what_is_kept_and_what_it_makes() -> None:
    with SubprocessRunner() as runner:
        assert runner.call(peak_of, _held, 64 * MIB) == pytest.approx(2 * 64 * MIB, rel=0.1)


@pytest.mark.peers
@pytest.mark.parametrize("weights", [name for name, kind in WEIGHTS.items() if kind])
def test_llama_cpp_gives_what_headway_gives(weights: str, tmp_path: Path) -> None:
    """Steps of several rows, and prompts, with the same weights."""
    written = Written("tiny", tmp_path)
    model, prompt = written.ours(weights), ids_of("tiny", 31)
    step = decoders.llama_cpp_steps(written.gguf(weights), prompt, 3)
    reading = decoders.llama_cpp_prompt(written.gguf(weights), prompt)
    for theirs, ours in (
        (step, decoders.our_steps(model, prompt, 3)),
        (reading, decoders.our_prompt(model, prompt)),
    ):
        for _ in range(2):
            assert difference(theirs()[0], ours()[0].float()) < decoders.apart(model.spec, weights)
    assert "AVX" in llama_cpp.system_info() or "NEON" in llama_cpp.system_info()
