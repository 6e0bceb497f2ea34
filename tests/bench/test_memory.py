"""Memory of a step, how it grows, and the processes in which it is measured."""

import json
import os

import pytest

from headway.errors import BackendError
from headway.patterns import Causal, Window
from headway_lab.bench import attention, growth, rows
from headway_lab.bench.cases import FORWARD, named
from headway_lab.bench.growth import GROWTHS, Growth, fitted_memory, memory_row
from headway_lab.bench.inputs import OURS
from headway_lab.bench.measure import Effort, measure
from headway_lab.bench.subprocess_runner import Peak, SubprocessRunner, peak
from headway_lab.profiling import doublings, line, power

MIB = 1 << 20
WINDOW = GROWTHS[0]


def test_the_exponent_of_a_power_law_is_found() -> None:
    x = doublings(1024, 16384)
    assert x == (1024, 2048, 4096, 8192, 16384)
    for p in (0.0, 1.0, 1.5, 2.0):
        assert power(x, [7.0 * n**p for n in x]) == pytest.approx(p)
    assert line(x, [3.0 * n + 5 for n in x]) == pytest.approx(3.0)


def test_growth_is_fitted_per_side_and_flat_where_nothing_is_held() -> None:
    def held(beyond: int, seconds: float) -> Peak:
        return Peak(beyond, 0, 0, seconds)

    lengths = (1024, 2048, 4096)
    sides = {
        OURS: {n: held(n * 8192, n * 1e-3) for n in lengths},
        "mask": {n: held(n * n * 4, n * n * 1e-6) for n in lengths},
        "sdpa": {n: held(1000 + n % 7, n * n * 1e-6) for n in lengths},
        "once": {1024: held(1, 1.0)},
    }
    row = fitted_memory(WINDOW, "float32", sides, "auto")
    assert row.extra["time_exponent"] == pytest.approx({OURS: 1.0, "mask": 2.0, "sdpa": 2.0})
    assert row.extra["memory_exponent"][OURS] == pytest.approx(1.0)
    assert row.extra["memory_exponent"]["mask"] == pytest.approx(2.0)
    assert row.extra["memory_exponent"]["sdpa"] is None
    assert row.extra["bytes_per_token"][OURS] == pytest.approx(8192)
    text = rows.to_text([row])
    assert "n^2.00" in text
    assert "flat" in text


def test_the_row_of_one_length() -> None:
    both = {OURS: Peak(2 * MIB, MIB, MIB, 0.5), "mask": Peak(8 * MIB, MIB, MIB, 1.5)}
    row = memory_row(WINDOW, 2048, "float32", both, "auto", [])
    said = json.loads(row.to_line())
    assert said["case"] == "window n=2048 forward+backward"
    assert (said["ours_mib"], said["peers_mib"], said["given_mib"]) == (2.0, {"mask": 8.0}, 2.0)
    assert said["ratio_best_peer"] == 3.0
    seen = 512 * 2048 - 512 * 511 / 2
    assert said["ours_gflops"] == pytest.approx(3.5 * 4 * 64 * 8 * seen / 0.5 / 1e9)
    assert memory_row(WINDOW, 2048, "float32", {}, "auto", ["why"]).notes == ["why"]


def test_lengths_are_cut_and_quick_is_short() -> None:
    assert growth.chosen(tokens=8192)[0].lengths == (2048, 4096, 8192)
    assert growth.chosen(tokens=256)[0].lengths == (64, 128, 256)
    assert growth.chosen(["mistral"], tokens=64)[0].lengths == (64,)
    quick = growth.chosen(quick=True)
    assert [one.name for one in quick] == ["window", "causal"]
    assert quick[0].lengths[-1] == 16384
    assert growth.chosen() == list(GROWTHS)


def test_what_is_held_is_measured_apart() -> None:
    scores = 8 * 1024 * 1024 * 4
    with SubprocessRunner({}) as runner:
        held = runner.call(peak, "stored", Causal(), 1024, "float32")
    tensor = 8 * 1024 * 64 * 4
    assert (held.inputs, held.outputs) == (4 * tensor, 4 * tensor)
    assert 2 * scores < held.beyond < 6 * scores, "scores and weights at least, and copies of them in between"


def test_the_outputs_are_not_held_beyond() -> None:
    with SubprocessRunner({}) as runner:
        held = runner.call(peak, "sdpa", Causal(), 4096, "float32")
    assert held.outputs == 4 * 8 * 4096 * 64 * 4
    assert held.beyond < held.outputs / 2, "the fused kernel keeps a number per row and small buffers"


def test_a_step_runs_here_for_every_side() -> None:
    for side in (OURS, "sdpa", "mask", "stored"):
        assert peak(side, Causal(), 64, "float32").seconds > 0
    assert peak(OURS, Window.last(16), 64, "bfloat16", backend="banded").inputs == 4 * 8 * 64 * 64 * 2


def test_rows_of_a_growth_and_its_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(growth: Growth, side: str, tokens: int, dtype: str, backend: str) -> Peak:
        if side == "mask" and tokens > 2048:
            raise BackendError("it ended with code -9")
        return Peak(tokens * 8192 * (2 if side == "mask" else 1), MIB, MIB, tokens * 1e-3)

    monkeypatch.setattr(growth, "peak_of", made_up)
    said: list[str] = []
    found = list(growth.memory([WINDOW.shorter(4096)], (), "auto", said.append))
    assert [row.case for row in found] == [
        "window n=2048 forward+backward",
        "window n=4096 forward+backward",
        "window growth",
    ]
    assert found[1].notes == ["mask not measured: it ended with code -9"]
    assert set(found[2].extra["time_exponent"]) == {OURS}
    assert said == ["window n=2048 float32: headway, mask", "window n=4096 float32: headway, mask"]


def test_a_row_from_another_process_is_a_row() -> None:
    effort = Effort(repeats=1, least=1, sample=0.0)
    case = named("window").at(32).with_peers(["mask"])
    with SubprocessRunner({"HEADWAY_TEST": "there"}) as runner:
        row = runner.call(measure, case, "float32", FORWARD, "banded", effort)
        assert row.case == "window n=32 forward"
        assert set(row.ratios) == {"mask"}
        assert row.machine["threads"] == 1
        assert runner.call(os.getenv, "HEADWAY_TEST") == "there"
        assert "HEADWAY_TEST" not in os.environ
        with pytest.raises(BackendError, match="unknown backend"):
            runner.call(peak, OURS, Causal(), 32, "float32", backend="no")
        runner._process.kill()
        with pytest.raises(BackendError, match="ended with code -9"):
            runner.call(os.getpid)


def test_the_other_baseline_says_why_it_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.sys, "platform", "linux")
    monkeypatch.setattr(attention.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(attention.torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(attention, "cpu_vendor", lambda: "GenuineIntel")
    assert "Intel" in str(attention.no_full_path())
    monkeypatch.setattr(attention, "cpu_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(attention, "compiler", lambda: None)
    assert "C compiler" in str(attention.no_full_path())
    monkeypatch.setattr(attention, "compiler", lambda: "/usr/bin/cc")
    assert attention.no_full_path() is None
    monkeypatch.setattr(attention.torch.backends.mkl, "is_available", lambda: False)
    assert "no MKL" in str(attention.no_full_path())
    monkeypatch.setattr(attention.platform, "machine", lambda: "aarch64")
    assert "x86-64" in str(attention.no_full_path())


def test_the_window_of_the_table_is_the_one_it_says() -> None:
    assert WINDOW.pattern == Window.last(512)
    assert WINDOW.lengths[-1] == 131072
