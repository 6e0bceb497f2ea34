"""Time and memory grow with the length (row 82), and the bench that says so."""

import pytest
import torch

from headway.attention.linear_attention import LinearAttentionSpec, choose_form
from headway.cli import run
from headway.errors import ConfigError
from headway.patterns import Causal
from headway_lab.bench import growth
from headway_lab.bench.cases import Case
from headway_lab.bench.growth import fitted_times, linear_flops, linear_problem
from headway_lab.bench.measure import Effort, Samples, summarized
from headway_lab.bench.rows import Row, to_text
from headway_lab.bench.subprocess_runner import Peak, SubprocessRunner, peak
from headway_lab.profiling import power

LENGTHS = (4096, 8192, 16384, 32768)


def held(tokens: int) -> Peak:
    """Forward and backward of causal linear attention, 8 heads of 64, in a process of its own."""
    with SubprocessRunner({}) as runner:
        return runner.call(peak, "headway", Causal(), tokens, "float32", "linear")


def flops(n: int, direction: str) -> float:
    return linear_flops(LinearAttentionSpec(), Case(name="linear", tokens=n), direction)


def test_row_82_products_are_linear_in_the_length() -> None:
    work = [choose_form(Causal(), n, n, 64, 64).flops or 0.0 for n in LENGTHS]
    assert power(LENGTHS, work) == pytest.approx(1.0)
    assert flops(4096, "forward+backward") == 3.5 * flops(4096, "forward") == 3.5 * 8 * work[0]


@pytest.mark.slow
def test_row_82_memory_with_the_backward_is_linear_in_the_length() -> None:
    """The scores of one head alone would take 4 GiB at the longest."""
    steps = [held(n) for n in LENGTHS]
    beyond = [float(step.beyond) for step in steps]
    print([f"{b / 2**20:.0f} MiB, {s.seconds:.2f} s" for b, s in zip(beyond, steps, strict=True)])
    assert 0.8 < power(LENGTHS, beyond) < 1.15
    assert beyond[-1] < 5 * steps[-1].inputs


def test_a_row_and_the_power_of_the_length() -> None:
    samples = Samples({"headway": [0.1, 0.1], "softmax": [0.3, 0.5]}, [1e11, 1e11])
    blank = Row("linear", "linear n=2048 forward", "float32", machine={"notes": []})
    row = summarized(
        blank, linear_problem(LinearAttentionSpec(), 2048, "forward"), samples, "torch's matrix product", 1.0
    )
    assert row.ours_ms == pytest.approx(100.0)
    assert row.ratios == pytest.approx({"softmax": 4.0})
    assert row.share_of_limit == pytest.approx(flops(2048, "forward") / 0.1 / 1e11)
    growth_row = fitted_times(
        "forward", {"headway": {1: 1.0, 2: 2.0}, "softmax": {1: 1.0, 2: 4.0}, "once": {1: 1.0}}
    )
    assert growth_row.extra["time_exponent"] == pytest.approx({"headway": 1.0, "softmax": 2.0})
    text = to_text([row, growth_row])
    assert "time grows as: headway n^1.00, softmax n^2.00" in text
    assert "of limit: torch's matrix product" in text


def test_the_bench_measures_every_length_beside_softmax(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(growth, "MOST", 256)
    said: list[str] = []
    spec, lengths, passes = LinearAttentionSpec("cosine"), (128, 256, 512), ("forward+backward",)
    rows = list(growth.linear(spec, lengths, passes, Effort(1, 1), say=said.append))
    assert [row.case for row in rows] == [
        *(f"linear n={n} forward+backward" for n in (128, 256, 512)),
        "linear growth forward+backward",
    ]
    assert [list(row.peers) for row in rows] == [["softmax"], ["softmax"], [], []]
    assert set(rows[-1].extra["time_exponent"]) == {"headway", "softmax"}
    assert said[0] == "cosine n=128 forward+backward"
    assert run(["bench", "linear", "--tokens", "512", "--quick", "--pass", "forward", "--threads", "1"]) == 0
    assert "linear n=512 forward" in capsys.readouterr().out
    assert run(["bench", "linear", "--feature", "elu"]) == 1
    assert "feature must be one of" in capsys.readouterr().err


def test_sides_are_the_same_numbers_in_every_pass() -> None:
    for direction, count in (("forward", 1), ("forward+backward", 4)):
        first, second = (
            linear_problem(LinearAttentionSpec(), 64, direction).sides["headway"]() for _ in range(2)
        )
        assert len(first) == count
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(ConfigError, match="feature must be one of"):
        LinearAttentionSpec("softmaxx")
