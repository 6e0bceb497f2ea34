"""Every operator of a step: its work is that of the formulas, its time a part of the step's."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from headway.cli import run
from headway.models import cost
from headway.native.loader import library
from headway_lab.bench import operators, train
from headway_lab.bench.decoders import decode_steps, prefill_steps
from headway_lab.bench.models import DECODERS
from headway_lab.bench.native_operators import BLOCK, LOGITS
from headway_lab.bench.rows import Row, to_text
from headway_lab.bench.steps import Step
from headway_lab.bench.torch_operators import torch_operators

TINY = DECODERS["tiny"]


@pytest.fixture(autouse=True)
def everything_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    if library() is None:
        pytest.skip("no native library")
    monkeypatch.setattr(operators, "LEAST", 0.0)


def ours(steps: Iterator[Step]) -> dict[str, Row]:
    (rows,) = (operators.taken_apart(step, 1) for step in steps)
    shares = [row.extra["share_of_step"] for row in rows]
    assert shares[:-1] == sorted(shares[:-1], reverse=True)
    assert all(json.loads(row.to_line())["bench"] == "operators" for row in rows)
    assert rows[0].case.rpartition(": ")[0] in to_text(rows)
    return {row.case.rpartition(": ")[2]: row for row in rows}


def flops(found: dict[str, Row]) -> float:
    return sum(row.extra["flops"] for row in found.values())


@pytest.mark.parametrize(
    ("weights", "bits"), [("bf16", 16), ("int8", 8.5), ("int4", 4.5), ("q4_K", 4.625), ("nf4", 4.125)]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_of_decoding_is_its_seven_operators(weights: str, bits: float, rows: int) -> None:
    found = ours(decode_steps(["tiny"], [weights], [rows], 24, lambda text: None))
    assert set(found) == {*BLOCK, LOGITS, operators.REST}
    assert flops(found) == rows * cost.decode_flops(TINY, 24)
    assert found["attention"].extra["bytes"] == cost.kv_bytes_read(TINY, 24, torch.bfloat16, rows)
    assert [found[name].extra["calls"] for name in ("down", LOGITS)] == [TINY.layers, 1]
    weights_alone = TINY.vocab * TINY.width * bits / 8
    in_and_out = rows * 2 * (TINY.vocab + TINY.width)
    assert found[LOGITS].extra["bytes"] == weights_alone + in_and_out


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_a_prompt_does_the_products_of_the_formula(weights: str) -> None:
    found = ours(prefill_steps(["tiny"], [weights], 160))
    assert flops(found) == cost.prefill_flops(TINY, 160)
    assert {"attention", "norm", "gate", "rotation", operators.REST} < set(found)
    assert found["norm"].extra["calls"] == 2 * TINY.layers + 1


def test_a_training_step_does_each_product_three_times() -> None:
    case = train.CASES["tiny-2x64"]
    found = ours(train.train_steps([case.name], ["bfloat16"], [], workers=1))
    for shape in ("256 x 512", "512 x 256", "256 x 256", "256 x 128"):
        kinds = [f"{kind} {shape}" for kind in ("product", "gradient of inputs", "gradient of weights")]
        assert len({(found[kind].extra["flops"], found[kind].extra["calls"]) for kind in kinds}) == 1
    pairs = 4.0 * TINY.head_dim * cost.attention_pairs(TINY, case.tokens) * case.rows
    assert found["attention"].extra["flops"] == pairs
    assert found["attention, backward"].extra["flops"] == 2.5 * pairs
    unread = 3 * case.rows * cost.head_flops(TINY)  # logits behind the last token, which has no target
    assert flops(found) == case.flops + unread + 0.5 * pairs


def test_torch_operators_are_what_they_read_and_write() -> None:
    x, layer = torch.ones(6, 4, requires_grad=True), nn.Linear(4, 5, bias=False)

    def call() -> None:
        y = layer(x)
        (y + y).backward(torch.ones(6, 5))
        torch.zeros(3).add_(torch.ones(3))
        torch.zeros(7, dtype=torch.bfloat16).copy_(torch.ones(7))

    found = torch_operators(call)
    by = {one.name: one for one in found if one.name in ("add_", "copy_") or " x " in one.name}
    for name in ("product 4 x 5", "gradient of inputs 4 x 5", "gradient of weights 4 x 5"):
        assert (by[name].flops, by[name].bytes) == (2.0 * 6 * 4 * 5, 4.0 * (6 * 4 + 6 * 5 + 4 * 5)), name
    assert by["add_"].bytes == 3 * 3 * 4
    assert by["copy_"].bytes == 7 * (2 + 4)
    assert all(one.seconds >= 0 for one in found)


def test_operators_are_drawn_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "--model",
        "tiny",
        "--weights",
        "bf16",
        "--rows",
        "1",
        "--context",
        "8",
        "--quick",
        "--operators",
    ]
    assert run(["bench", "decode", *given, "--out", str(tmp_path)]) == 0
    assert "limits: reading" in capsys.readouterr().out
    assert (tmp_path / "operators.png").read_bytes().startswith(b"\x89PNG")
