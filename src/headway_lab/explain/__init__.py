"""Questions about attention, each answered by a run.

A topic is a module of its name, or a row of `contests.CONTESTS`, with

    FORMULA                                what is verified, as text
    run(*, seeds=..) -> Report             measures; writes nothing; deterministic for its seeds; its parameters are the
                                           topic's settings, and `headway explain` takes them as options
    QUICK                                  settings of a smaller run, of topics that take more than a few seconds
    draw(figure, report) -> None           paints the report on a matplotlib figure

`explain(topic, out)` runs it and, when `out` is given, writes `out/TOPIC.csv` (the table) and `out/TOPIC.png`.
"""

import csv
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, did_you_mean, listed
from headway_lab.explain.report import Report


@dataclass(frozen=True)
class Topic:
    """How long its run takes, in seconds of one core of 2023, and what it asks."""

    seconds: int
    question: str


GROUPS: dict[str, dict[str, Topic]] = {
    "attention": {
        "scale": Topic(2, "Why are the scores divided by the square root of the head's width?"),
        "masks": Topic(2, "Does a mask keep the future out? The four patterns, drawn"),
        "permutation": Topic(1, "Does attention know the order of its tokens?"),
        "multi-head": Topic(12, "Why several heads? One head has one place to look at"),
        "heads": Topic(3, "What do heads share in MHA, GQA and MQA, and what does it save?"),
        "complexity": Topic(
            4, "Why self-attention? Operations, sequential steps and path lengths of four kinds of layer"
        ),
        "receptive-field": Topic(3, "How far does a stack of windows see?"),
    },
    "memory and time": {
        "cache": Topic(5, "What does the KV cache save, and does it change the result?"),
        "memory": Topic(8, "Why does attention eat memory, and what does a window change?"),
        "packing": Topic(1, "What does padding waste, and do packed examples see each other?"),
        "adapters": Topic(3, "What does an adapter of low rank train, and does merging it change the model?"),
    },
    "positions": {
        "sinusoids": Topic(1, "What do sinusoids tell of positions and distances?"),
        "embedding": Topic(1, "Why are embeddings multiplied by the square root of the width?"),
        "rotary-identity": Topic(
            1, "Why do vectors turned by absolute positions give scores of relative ones?"
        ),
        "rotary-forms": Topic(3, "Are the printed ways of turning the same, and what does each cost?"),
        "rotary-expansion": Topic(
            1, "What does the second term of a turned product mean, and does it decay without it?"
        ),
        "rotary-decay": Topic(1, "Do rotary positions make far tokens matter less?"),
        "rotary-frequencies": Topic(
            9, "Why d/2 angles instead of one, and does any other choice of them decay?"
        ),
        "rotary-values": Topic(6, "Why are values not turned?"),
        "rotary-shift": Topic(
            3, "All positions moved by 1000 change the output a little: is rotary not invariant?"
        ),
        "rotary-linear": Topic(
            6, "What breaks when linear attention turns queries and keys in its denominator too?"
        ),
    },
    "blocks": {
        "norms": Topic(2, "What do BatchNorm, LayerNorm and RMSNorm average over?"),
        "residual-order": Topic(
            5, "Norm before or after the residual: what happens to the gradients of a deep stack?"
        ),
        "swish": Topic(1, "What is Swish between beta = 0 and beta = infinity?"),
    },
    "small models, trained": {
        "positions": Topic(
            100,
            "Over one switch, at equal budgets: which marks of positions does a small model learn best with?",
        ),
        "extrapolation": Topic(90, "Which marks of positions bear rows longer than those of training?"),
        "rotary-layers": Topic(100, "What is lost when only some layers turn?"),
        "rotary-switches": Topic(
            90, "What do other frequencies, and turned values, do to a model trained on text?"
        ),
        "rotary-trained": Topic(25, "Do rotary frequencies that are trained move, and is it worth it?"),
        "blocks": Topic(
            65,
            "What is different between the Transformer of 2017 and LLaMA, and what does each difference do?",
        ),
        "linear-training": Topic(
            120, "Does a model with linear attention and rotary positions train, and at what cost per token?"
        ),
    },
}

TOPICS = {name: topic.question for group in GROUPS.values() for name, topic in group.items()}


def find_topic(name: str) -> Any:
    """The module or the contest of that name. Raises ConfigError for a name that does not exist."""
    if name not in TOPICS:
        raise ConfigError(f"no topic {name!r}{did_you_mean(name, TOPICS)}; topics are {', '.join(TOPICS)}")
    from headway_lab.explain.contests import CONTESTS

    return CONTESTS.get(name) or importlib.import_module(f"headway_lab.explain.{name.replace('-', '_')}")


def settings_of(name: str) -> tuple[str, ...]:
    """What a topic takes: the parameters of its `run`, and "quick" where it has a smaller run."""
    topic = find_topic(name)
    return (*inspect.signature(topic.run).parameters, *(("quick",) if getattr(topic, "QUICK", None) else ()))


def explain(name: str, out: Path | None = None, *, quick: bool = False, **settings: Any) -> Report:
    """Run one topic. With `out`, write `out/TOPIC.csv` and `out/TOPIC.png` too.

    Args:
        quick: the topic's smaller run; `settings` come before its own. What it does not show, it is too small to tell.
        settings: as the topic's `run` has them (`settings_of`).
    Raises ConfigError for a topic that does not exist, for a setting that it does not take, and for seeds without a
    spread."""
    topic, taken = find_topic(name), settings_of(name)
    given: Mapping[str, Any] = {**settings, **({"quick": True} if quick else {})}
    if unknown := [option(key) for key in given if key not in taken]:
        takes = f"it takes {listed([option(key) for key in taken])}" if taken else "it takes no settings"
        raise ConfigError(f"explain {name}: the topic takes no {listed(unknown)}; {takes}")
    if small := [f"{option(key)} {value}" for key, value in settings.items() if key != "seeds" and value < 1]:
        raise ConfigError(f"explain {name}: settings are 1 or more, got {listed(small)}")
    if "seeds" in settings and len(set(settings["seeds"])) < 2:
        raise ConfigError(
            f"explain {name}: a spread needs two different seeds or more, got {tuple(settings['seeds'])}"
        )
    found = topic.run(**{**(topic.QUICK if quick else {}), **settings})
    claims = {claim: (seen or None) if quick else seen for claim, seen in found.claims.items()}
    report: Report = replace(found, claims=claims, topic=name, question=TOPICS[name], formula=topic.FORMULA)
    if out is None:
        return report
    from headway.draw import saved_figure

    out.mkdir(parents=True, exist_ok=True)
    table_path, figure_path = out / f"{name}.csv", out / f"{name}.png"
    with table_path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([report.columns, *report.cells])
    with saved_figure(figure_path) as figure:
        topic.draw(figure, report)
    return replace(report, figure=figure_path, csv=table_path)


def option(setting: str) -> str:
    """A setting as the command line has it: kv_heads -> --kv-heads."""
    return f"--{setting.replace('_', '-')}"
