"""Every topic of explain once, at toy size, with its own clock and text: its report, its figure and where its verdict
turns are listed in tests/explain/listings (`tests.listings`)."""

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from headway.models import build
from headway_lab.explain import TOPICS, explain
from headway_lab.explain.contests import CONTESTS, Contest
from headway_lab.explain.report import Claim, Report
from headway_lab.explain.runs import Run, small
from headway_lab.explain.topics import Topic
from tests import figures, listings
from tests.explain import edges
from tests.listings import Clock, number

LISTINGS = Path(__file__).parent / "listings"
TWO: Mapping[str, Any] = {"seeds": (0, 1)}
TRAINED: Mapping[str, Any] = {"seeds": (0, 1), "steps": 2}
SHORT: Mapping[str, Any] = {"seeds": (0, 1), "steps": 10}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "multi-head": {**TWO, "steps": 160},
    "complexity": {"d": 32},
    "heads": {"context": 1024},
    "cache": {"context": 512},
    "memory": {"context": 512},
    **dict.fromkeys(("rotary-decay", "rotary-linear", "rotary-shift", "norm-orders"), TWO),
    **dict.fromkeys(("rotary-frequencies", "rotary-values"), SHORT),
    **dict.fromkeys((*CONTESTS, "extrapolation", "rotary-trained", "blocks", "linear-training"), TRAINED),
}
PATCHED: Mapping[str, Any] = {
    "runs.HELD_OUT_ROWS": 8,
    "extrapolation.ROWS": 2,
    "linear_training.LENGTHS": (64, 128, 256),
    "linear_training.REPEATS": 1,
    "blocks.REPEATS": 2,
    "residual_order.DEPTHS": (4, 8, 16),
    "norm_orders.DEPTHS": (4, 8, 16),
    "experts.ROWS": 64,
    "experts.DRAWS": 50,
    "rotary_decay.PAIRS": 128,
    "rotary_forms.REPEATS": 3,
}


@dataclass(frozen=True)
class Toy:
    """A topic at toy size: its `report`, made of `found`, the report without sentences, and of the values `known`; its
    verdict as the function `judge`, and the arguments `given` to it."""

    topic: str
    report: Report
    found: Report
    known: Mapping[str, Any]
    judge: Callable[..., Report] | None
    given: tuple[Any, ...]


def module_of(topic: str) -> ModuleType:
    return import_module(
        f"headway_lab.explain.{'contests' if topic in CONTESTS else topic.replace('-', '_')}"
    )


def made(*losses: float, size: int = 1) -> tuple[Run, ...]:
    """Returns runs of models of `size` layers with these losses."""
    model = build(small(layers=size), device="meta")
    return tuple(Run(model, loss, 1.0) for loss in losses)


def lost(report: Report) -> list[Claim]:
    """Returns the claims that a report does not show."""
    return [claim for claim, seen in report.claims.items() if not seen]


@cache
def words() -> tuple[Tensor, Tensor]:
    """Returns bytes to train on and held-out bytes, like those of a text: words of one to eight letters, some
    frequent."""
    noise = torch.Generator().manual_seed(0)
    letters = torch.tensor(list(b"eeeettttaaaooonnniiissshhrrddllucmfwygpbvk"))
    sizes = torch.randint(1, 9, (200,), generator=noise).tolist()
    known = [letters[torch.randint(len(letters), (size,), generator=noise)].tolist() for size in sizes]
    drawn = (200 * torch.rand(60_000, generator=noise) ** 3).long().tolist()
    flat = torch.tensor([byte for word in drawn for byte in (*known[word], 32)])
    return flat[20_000:], flat[:20_000]


def at_toy_size(patch: pytest.MonkeyPatch) -> None:
    """Patches the topics: few rows to judge by, and short rows in topics that grow them."""
    for name, value in PATCHED.items():
        patch.setattr(f"headway_lab.explain.{name}", value)
    patch.setattr("headway_lab.explain.runs.text", words)


@cache
def toy(topic: str) -> Toy:
    """Returns a topic's run, once per process."""
    calls: list[tuple[Any, ...]] = []
    tellings: list[tuple[Report, Mapping[str, Any]]] = []
    owner: Any = Contest if topic in CONTESTS else module_of(topic)
    judge = getattr(owner, "judge", None)

    def spy(*arguments: Any) -> Report:
        calls.append(arguments)
        assert judge is not None
        report: Report = judge(*arguments)
        return report

    def listener(telling: Topic, name: str, found: Report, **known: Any) -> Report:
        tellings.append((found, known))
        return tell(telling, name, found, **known)

    tell = Topic.told
    with pytest.MonkeyPatch.context() as patch:
        at_toy_size(patch)
        patch.setattr(time, "process_time", Clock())
        patch.setattr(Topic, "told", listener)
        if judge:
            patch.setattr(owner, "judge", spy)
        report = explain(topic, **SETTINGS.get(topic, {}))
    return Toy(topic, report, *tellings[-1], judge, calls[-1] if calls else ())


class Reports(dict[Any, Report]):
    """The report of each topic, by its name or its module, made on first use."""

    def __missing__(self, key: str | ModuleType) -> Report:
        name = key if isinstance(key, str) else key.__name__.rpartition(".")[2].replace("_", "-")
        return toy(name).report


def check(toy: Toy) -> None:
    """Compares what a topic reports, draws and where its verdict turns with its listing."""
    drawn = Figure()
    with pytest.MonkeyPatch.context() as patch:
        at_toy_size(patch)
        getattr(CONTESTS.get(toy.topic) or module_of(toy.topic), "draw")(drawn, toy.report)  # noqa: B009
    turns = [] if toy.judge is None else ["", *edges.listing(toy.judge, toy.given)]
    place = TOPICS[toy.topic]
    settings = inspect.signature((CONTESTS.get(toy.topic) or module_of(toy.topic)).run)
    parts = [f"{place.seconds} s {settings}", reported(toy.report), figures.listing(drawn), *turns]
    if toy.topic not in CONTESTS:
        parts += ["", listings.constants(module_of(toy.topic))]
    listings.check(LISTINGS / f"{toy.topic}.txt", "\n".join(parts))


def reported(report: Report) -> str:
    """Returns the text of a report without question and formula, which stand in the topic."""
    lines = [f"{report.setting}\n{report.finding}\nhighlight {report.highlight}\n{report.picture}", ""]
    lines += [f"{word}: {claim}" for claim, word in report.claims.items()]
    lines += ["", " | ".join(report.columns)]
    shown = report.cells[:: 1 + len(report.cells) // 48]
    lines += [
        " | ".join(value if isinstance(value, str) else number(value) for value in row) for row in shown
    ]
    return "\n".join([*lines, ""])
