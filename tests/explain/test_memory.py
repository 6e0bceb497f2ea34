"""The topic memory (row 109): its measurements equal its formula."""

import re
from typing import Any

import pytest
import torch

from headway.models import cost
from headway_lab.explain import TOPICS, Measured, known, memory
from headway_lab.explain.memory import LiveBytes

FORMULA = TOPICS["memory"].formula


def test_live_bytes_sees_what_is_alive_at_once() -> None:
    with LiveBytes() as live:
        a = torch.ones(1000)  # 4000 bytes
        b = a + 1
        del b
        c = a.view(10, 100)  # no memory of its own
        d = c * 2
        del d
    assert live.peak == 8000
    with LiveBytes() as live_list:
        kept = [a + i for i in range(5)]
    assert live_list.peak == 20000
    assert len(kept) == 5


@pytest.mark.parametrize("kind", memory.KINDS, ids=lambda kind: kind[0])
def test_prediction_is_what_is_kept_and_the_peak(kind: tuple[str, memory.Pattern, str]) -> None:
    step = memory.measure(*kind, 256)
    assert step["kept (B)"] == pytest.approx(step["predicted (B)"], rel=memory.CLOSE)
    assert step["peak (B)"] == pytest.approx(step["predicted peak (B)"], rel=memory.PEAK_CLOSE)
    assert step["kept (B)"] < step["peak (B)"]
    assert (step["scores (B)"] > 0) == (kind[2] == "dense")


def test_the_table_is_the_printed_formula() -> None:
    """Evaluates each cause as the formula prints it and compares it with the table."""
    sizes = {"L": 2, "M": 64, "H": 4, "D": 16, "F": 128, "V": 64, "n": 512}

    def printed(cause: str) -> int:
        match = re.search(rf"{cause} +((?:[0-9A-Zn^ +]|\([^)]*\))+?)(?:   |\n|,|;|$)", FORMULA)
        assert match, cause
        product = re.sub(r"(?<=[\w)]) +(?=[\w(])", " * ", match[1].strip()).replace("^", "**")
        return int(eval(product, {}, sizes))

    _, pattern, backend = memory.KINDS[0]
    prediction = memory.predicted(pattern, backend, 512)
    names = {
        "scores": "scores",
        "attention": "attention",
        "norms": "norms",
        "feed-forward": "feed-forward",
        "logits": "logits",
        "tables of angles": "tables",
    }
    for cause, name in names.items():
        assert printed(cause) == prediction[f"{name} (B)"], cause
    assert printed("besides:") == prediction["predicted peak (B)"] - prediction["predicted (B)"]
    _, pattern, backend = memory.KINDS[2]
    window = memory.predicted(pattern, backend, 512)
    assert window["attention (B)"] - prediction["attention (B)"] == 4 * 2 * 512 * 4 * 16
    assert window["predicted peak (B)"] - window["predicted (B)"] == 4 * 512 * (4 * 128 + 3 * 64)
    for text in ("4 L n H D more for the window's kernel", "4 n (4 F + 3 M)"):
        assert text in FORMULA


def steps() -> list[dict[str, Any]]:
    """Returns invented measurements that equal the predictions."""
    measurements = []
    for kind, pattern, backend in memory.KINDS:
        for n in (512, 1024, 2048):
            pairs = cost.attention_pairs(memory.spec_of(pattern), n)
            step = {"kind": kind, "n": n, "pairs": pairs, **memory.predicted(pattern, backend, n)}
            measurements.append(
                {**step, "kept (B)": step["predicted (B)"], "peak (B)": step["predicted peak (B)"]}
            )
    return measurements


def test_the_verdict_follows_the_numbers() -> None:
    right = steps()
    report = Measured("memory", memory.judge(right, {1}), known("memory")).told()
    assert report.seen, report.verdict
    assert "16-fold and the other activations 4-fold" in report.finding
    assert "within 0.00%" in report.finding
    first, *rest = right
    for change in ({"kept (B)": first["kept (B)"] * 1.012}, {"peak (B)": first["peak (B)"] * 1.12}):
        assert not memory.judge([{**first, **change}, *rest], {1}).seen, "a correction that the table lacks"
    assert not memory.judge([{**step, "peak (B)": first["peak (B)"]} for step in right], {1}).seen
    assert not memory.judge(right, {1, 2}).seen
    assert len(memory.parameter_bytes()) == 1


def test_the_pairs_of_a_window_are_those_of_the_formula() -> None:
    heads, w = 4 * 2, memory.WINDOW - 1
    for step in steps():
        n = step["n"]
        per_head = n * (w + 1) - w * (w + 1) // 2 if step["kind"] == "window" else n * (n + 1) // 2
        assert step["pairs"] == heads * per_head


@pytest.mark.slow
def test_the_whole_topic_is_seen() -> None:
    report = memory.run()
    assert report.seen, report.verdict
    assert report.column("n")[:3] == [512, 1024, 2048]
