"""Measures of a stage that need a clock, with a clock whose times are known."""

import time
from typing import Any

import pytest

from headway.models import ModelSpec, build
from headway.recipes import run


def test_decoding_is_timed_without_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt takes 3 s and a step 1 s, except in a few runs, which other work disturbs."""
    now, steps = 0.0, iter([1.0, 1.0, 0.0, 4.0, 0.0, 1.0, 0.0, 0.5, 0.0, 1.0, 0.0])

    def generated(model: Any, prompts: list[list[int]], settings: Any) -> None:
        nonlocal now
        assert {len(prompt) for prompt in prompts} == {40}
        now += 3 + (settings.max_new_tokens - 1) * next(steps)

    monkeypatch.setattr(run, "generate", generated)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    model = build(ModelSpec.of_depth(1, 16, width=8, heads=1, kv_heads=1, head_dim=8))
    assert run.decoding_speed(model, 40) == run.ROWS
