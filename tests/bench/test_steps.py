"""What the bench runs in processes of its own, run in this one."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.attention import attend
from headway.errors import BackendError
from headway.patterns import Window
from headway_lab.bench import decoders, forms, growth, models, peers, subprocess_runner
from headway_lab.bench import measure as measuring
from headway_lab.bench.attention import measure
from headway_lab.bench.cases import CASES, FORWARD, TRAIN
from headway_lab.bench.forms import FORMS, Step, step
from headway_lab.bench.inputs import UnsupportedCase, make
from headway_lab.bench.measure import Effort, difference
from headway_lab.bench.subprocess_runner import LimitReached, SubprocessRunner, peak_of
from tests.bench import listed

MIB = 1 << 20
ONCE = Effort(repeats=1, least=1, sample=0.0)


def refuse(why: str) -> None:
    raise BackendError(why)


def kept(size: int, seconds: float) -> str:
    held = bytearray(b"x") * size
    time.sleep(seconds)
    return f"{len(held) >> 20} MiB"


def test_a_process_is_ended_above_its_bytes_and_its_seconds() -> None:
    with SubprocessRunner() as runner:
        runner.call(kept, MIB, 0.0)
        assert runner.call_within(90 * MIB, 60.0, kept, 10 * MIB, 0.1) == "10 MiB"
        with pytest.raises(LimitReached, match=r"^90 MiB$"):
            runner.call_within(90 * MIB, 60.0, kept, 200 * MIB, 60.0)
        with pytest.raises(BackendError, match="was killed, or crashed"):
            runner.call(kept, MIB, 0.0)
    with SubprocessRunner() as runner, pytest.raises(LimitReached, match=r"^0.1 s$"):
        runner.call_within(90 * MIB, 0.1, kept, MIB, 60.0)


def test_a_row_from_another_process_is_a_row() -> None:
    effort = Effort(repeats=1, least=1, sample=0.0)
    case = CASES["window"].at(32).with_peers(["mask"])
    with SubprocessRunner() as runner:
        row = runner.call(measure, case, "float32", FORWARD, "banded", effort)
        assert row.case == "window n=32 forward"
        assert set(row.ratios) == {"mask"}
        assert row.machine["threads"] == 1
        with pytest.raises(BackendError, match=r"^not here$"):
            runner.call(refuse, "not here")
        runner._process.kill()
        with pytest.raises(BackendError, match="was killed, or crashed"):
            runner.call(os.getpid)


def test_the_peak_of_the_second_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    befores = iter([10 * MIB, 11 * MIB])
    monkeypatch.setattr(subprocess_runner, "forget_peak", lambda: calls.append("forget") or next(befores))
    monkeypatch.setattr(subprocess_runner.hardware, "peak_rss", lambda: 30 * MIB)

    def make_call(word: str) -> Any:
        return lambda: calls.append(word)

    assert peak_of(make_call, "step") == 20 * MIB
    assert calls == ["forget", "step", "forget", "step"]

    def no_file(*_: object) -> None:
        raise PermissionError("no")

    monkeypatch.undo()
    monkeypatch.setattr(Path, "write_text", no_file)
    with pytest.raises(UnsupportedCase, match="the peak memory of a process cannot be reset here: no"):
        subprocess_runner.forget_peak()


# -- forms ---------------------------------------------------------------------------------------------------------


def test_a_step_of_a_form_holds_its_inputs_and_what_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.4, 0.3, 2.0])
    counts: list[int] = []
    monkeypatch.setattr(forms, "fastest", lambda call, count: counts.append(count) or next(times))
    monkeypatch.setattr(forms, "forget_peak", lambda: 10 * MIB)
    monkeypatch.setattr(forms.hardware, "peak_rss", lambda: 12 * MIB)
    input_bytes = 3 * 4 * 32 * 64 * 4
    assert step("loop", Window.last(8), 32) == Step(2 * MIB + input_bytes, 0.3)
    assert counts == [1, 2], "as many as a second has room for, four at most"
    assert step("full", Window.last(8), 32, TRAIN).seconds == 2.0
    assert counts[2:] == [1], "a slow one is timed once"


def told(steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Here:
        def __enter__(self) -> "Here":
            return self

        def __exit__(self, *_: object) -> None: ...

        def call(self, function: Any, *values: Any) -> None:
            assert (function, values[2]) == (step, growth.WARM)

        def call_within(self, limit: int, seconds: float, function: Any, name: str, *values: Any) -> Step:
            assert (limit, seconds, values[0], values[2]) == (
                256 * MIB,
                60 + 8 * 2.0,
                Window.last(16),
                FORWARD,
            )
            result: Step = steps(name, values[1])
            return result

    monkeypatch.setattr(growth, "SubprocessRunner", Here)


def test_rows_of_a_growth_of_forms_are_as_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(name: str, n: int) -> Step:
        if name == "full" and n == 512:
            raise LimitReached("256 MiB")
        if name == "sdpa" and n == 256:
            raise LimitReached("9 s")
        if name == "banded":
            raise BackendError("no such backend")
        if name == "chunks":
            return Step(n << 11, 0.6)
        return Step(n * n if name == "full" else n << 10, n * 1e-6)

    told(steps, monkeypatch)
    request = growth.Request(
        window=Window.last(16), most=1024, direction=FORWARD, forms=list(FORMS), limit=256 * MIB, seconds=2.0
    )
    messages: list[str] = []
    rows = list(growth.growth(request, messages.append))
    listed.check("forms", [*messages, *listed.rows_of(rows)])


# -- what is not there ---------------------------------------------------------------------------------------------


def test_without_a_library_limits_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "search", lambda: SimpleNamespace(library=None))
    limits = [make(torch.float32) for make in measuring.LIMITS.values()]
    assert [limit.name for limit in limits] == ["torch's matrix product", "read of memory by torch's sum"]
    assert all(1e6 < limit.measure() < 1e16 for limit in limits)


def test_flex_attention_is_compiled_once_and_gives_what_attend_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention is replaced by its definition in dense attention, and compilation is left out."""

    def dense(q: Any, k: Any, v: Any, *, block_mask: Any, enable_gqa: bool) -> torch.Tensor:
        assert enable_gqa == (q.shape[1] != k.shape[1])
        n = torch.arange(q.shape[2])
        seen = block_mask(None, None, n[:, None], n)
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, enable_gqa=enable_gqa
        )

    monkeypatch.setattr(peers, "flex_attention", dense)
    monkeypatch.setattr(peers, "create_block_mask", lambda seen, *sizes, device: seen)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: None)
    for name in ("window", "window-around", "dilated", "grouped"):
        at = make(CASES[name].at(96), "float32", FORWARD)
        assert difference(peers.flex(at)(), attend(at.q, at.k, at.v, at.case.pattern)) < 1e-5

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(peers, "flex_attention", broken)
    with pytest.raises(UnsupportedCase, match=r"^it does not compile here: no compiler$"):
        peers.flex(at)
    with pytest.raises(UnsupportedCase, match="plain windows only"):
        peers.flex(make(CASES["causal"].at(32), "float32", FORWARD))


def test_without_transformers_decoding_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnsupportedCase("transformers is not installed")

    monkeypatch.setattr(models, "transformers", missing)
    (row,) = decoders.decode(["tiny"], ["bf16"], [1], 8, effort=ONCE, say=lambda text: None)
    assert row.peers == {}
    assert "transformers: transformers is not installed" in row.notes
