"""`headway diff A B --ladder`: the models between two models, trained one difference at a time."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from headway.cli import commands, offered, run
from headway.errors import ConfigError
from headway.models import ModelSpec, catalog
from headway.models.difference import differences
from headway.positions import Rotary, Sinusoidal
from headway_lab.explain import ladders
from headway_lab.explain.ladders import LAYERS, WIDTH, judge, sentences, steps_of, toy
from headway_lab.explain.report import Report
from headway_lab.explain.runs import Budget, Run, Runs, contend

SIZES: dict[str, Any] = {"vocab": 999, "width": 768, "layers": 12, "heads": 12}
TRANSFORMER = ModelSpec.of("transformer", hidden=3072, **SIZES)
LLAMA = ModelSpec.of("llama", hidden=2048, kv_heads=6, **SIZES)
BUDGET = Budget(steps=2, rows=2, tokens=16, seeds=(0, 1))


def test_a_toy_keeps_the_block_and_its_proportions() -> None:
    small = toy(LLAMA, 16)
    assert (small.width, small.layers, small.heads, small.kv_heads, small.hidden) == (64, 2, 4, 2, 168)
    assert toy(TRANSFORMER, 16).embedding_scale == 8
    assert toy(catalog.spec("falcon-7b"), 16).kv_heads == 1
    aspects = {difference.aspect for difference in differences(small, LLAMA)}
    assert aspects == {"layers", "feed-forward", "heads", "embedding", "context"}
    with pytest.raises(ConfigError, match="--ladder trains a single stack"):
        toy(catalog.spec("transformer-base"), 16)


def test_row_33_every_step_differs_from_the_one_above_in_one_aspect() -> None:
    steps = steps_of(TRANSFORMER, LLAMA, 16)
    assert list(steps)[:6] == ["first", "order", "norm", "positions", "feed-forward", "heads"]
    assert not {"family", "context"} & {*steps}
    specs = list(steps.values())
    for name, previous, current in zip(list(steps)[1:], specs, specs[1:], strict=False):
        assert [difference.aspect for difference in differences(previous, current)] == [name]
    assert isinstance(specs[0].positions, Sinusoidal)
    assert isinstance(specs[-1].positions, Rotary)
    with pytest.raises(ConfigError, match="no step between them to train"):
        steps_of(LLAMA, LLAMA, 16)


def trained(losses: dict[str, tuple[float, ...]]) -> Report:
    """Returns the report of a ladder whose runs ended at these losses; a step without losses ends as the step above
    it."""
    runs, last = {}, (2.0, 2.1)
    for name, spec in steps_of(TRANSFORMER, LLAMA, 16).items():
        last = losses.get(name, last)
        model: Any = SimpleNamespace(spec=spec)
        runs[name] = [Run(model, loss, 1.0) for loss in last]
    return sentences("en").told("ladder", judge(runs, BUDGET), LAYERS=LAYERS, WIDTH=WIDTH)


def test_the_verdict_follows_from_the_losses() -> None:
    helped = trained({"order": (1.5, 1.6), "heads": (1.7, 1.8)})
    assert helped.finding.startswith(
        "changes beyond their spread, the largest first: order -0.500, heads +0.200. From first to last: -0.300"
    )
    assert helped.finding.endswith("seen")
    noisy = trained({"order": (1.5, 2.4)})  # the differences are -0.5 and +0.3: a spread of 12.7 * 0.4
    assert noisy.finding.startswith("changes beyond their spread, the largest first: none. From first")
    assert noisy.finding.endswith("too small to tell")
    assert [claim for claim, seen in helped.claims.items() if seen] == [
        "order changes it",
        "heads changes it",
    ]
    assert not any(noisy.claims.values())


def test_the_command_trains_the_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[Budget] = []

    def short(specs: Any, budget: Budget) -> Runs:
        budgets.append(budget)
        return contend({name: specs[name] for name in list(specs)[:2]}, BUDGET)

    monkeypatch.setattr(ladders, "contend", short)
    assert run(["diff", "transformer", "llama", "--ladder", "--steps", "7", "--seeds", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    ladder = json.loads(out)["ladder"]
    assert [(b.steps, b.seeds) for b in budgets] == [(7, (0, 1))]
    rows = [dict(zip(ladder["columns"], row, strict=True)) for row in ladder["rows"]]
    assert [row["contender"] for row in rows] == ["first", "order"]
    assert rows[0]["loss"] > 1
    assert "training each step of the ladder: 7 steps" in err
    assert run(["diff", "transformer", "llama", "--steps", "7"]) == 1
    assert "are only for --ladder" in capsys.readouterr().err


def test_without_the_laboratory_the_error_says_what_offers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered("ladder") is ladders.command
    known = {name: command._replace(offers={}) for name, command in commands().items()}
    monkeypatch.setattr("headway.cli.commands", lambda: known)
    with pytest.raises(ConfigError, match=r"offers 'ladder'.*pip install \"headway\[lab\]\""):
        offered("ladder")
