"""Work and memory of linear attention grow linearly with the length (requirement 82)."""

import pytest

from headway.attention.linear_attention import choose_form
from headway.patterns import Causal, Window
from headway_lab.bench.cases import TRAIN
from headway_lab.bench.forms import HEADS, WIDTH, Step, step
from headway_lab.bench.growth import WARM
from headway_lab.bench.subprocess_runner import SubprocessRunner
from headway_lab.profiling import power

LENGTHS = (4096, 8192, 16384, 32768)


def held(tokens: int) -> Step:
    """Measures forward and backward of causal linear attention, 4 heads of 64, in its own process."""
    with SubprocessRunner() as runner:
        runner.call(step, "linear", Window.last(1), WARM, TRAIN)
        return runner.call(step, "linear", Window.last(1), tokens, TRAIN)


def test_row_82_products_are_linear_in_the_length() -> None:
    work = [choose_form(Causal(), n, n, 64, 64).flops or 0.0 for n in LENGTHS]
    assert power(LENGTHS, work) == pytest.approx(1.0)


@pytest.mark.slow
def test_row_82_memory_with_the_backward_is_linear_in_the_length() -> None:
    """At the longest length, the scores of one head alone would take 4 GiB."""
    steps = [held(n) for n in LENGTHS]
    inputs = 3 * HEADS * WIDTH * 4
    beyond = [float(measured.held - inputs * n) for measured, n in zip(steps, LENGTHS, strict=True)]
    print([f"{b / 2**20:.0f} MiB, {s.seconds:.2f} s" for b, s in zip(beyond, steps, strict=True)])
    assert 0.6 < power(LENGTHS, beyond) < 1.15  # buffers of constant size are a fifth at the shortest length
    assert beyond[-1] < 6 * inputs * LENGTHS[-1]
