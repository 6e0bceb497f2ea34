"""Every operator of a step: its work is that of the formulas, its time a part of the step's."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headway.cli import run
from headway.models import cost
from headway.native.loader import library
from headway_lab.bench import operators
from headway_lab.bench.decoders import decode_steps
from headway_lab.bench.models import DECODERS
from headway_lab.bench.operators import BLOCK, LOGITS
from headway_lab.bench.rows import Row, to_text
from headway_lab.bench.steps import Step

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
