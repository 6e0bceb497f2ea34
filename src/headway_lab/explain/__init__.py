"""Questions about attention, each answered by a run.

What topics ask and verify is data, `topics.toml`; what answers a topic is a module of its name, or a row of
`contests.CONTESTS`, with

    run(*, seeds=..) -> Report             measures; writes nothing; deterministic for its seeds; its parameters are the
                                           topic's settings, and `headway explain` takes them as options
    draw(figure, report) -> None           paints the report on a matplotlib figure

`explain(topic, out)` runs it and, when `out` is given, writes `out/TOPIC.csv` (the table) and `out/TOPIC.png`.
"""

import csv
import importlib
import inspect
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, did_you_mean, listed
from headway_lab.explain.report import Report


@dataclass(frozen=True)
class Topic:
    """What a topic asks, and what is verified: as text, and in TeX; seconds of one core of 2023 that its run takes, and
    the settings of a smaller run, where there is one."""

    question: str
    formula: str
    tex: Sequence[str]
    seconds: int
    quick: Mapping[str, Any] = field(default_factory=dict)


GROUPS: dict[str, dict[str, Topic]] = {
    group: {name: Topic(**own) for name, own in topics.items()}
    for group, topics in tomllib.loads(
        files("headway_lab.explain").joinpath("topics.toml").read_text(encoding="utf-8")
    ).items()
}
TOPICS = {name: topic for group in GROUPS.values() for name, topic in group.items()}


def find_topic(name: str) -> Any:
    """The module or the contest of that name. Raises ConfigError for a name that does not exist."""
    if name not in TOPICS:
        raise ConfigError(f"no topic {name!r}{did_you_mean(name, TOPICS)}; topics are {', '.join(TOPICS)}")
    from headway_lab.explain.contests import CONTESTS

    return CONTESTS.get(name) or importlib.import_module(f"headway_lab.explain.{name.replace('-', '_')}")


def settings_of(name: str) -> tuple[str, ...]:
    """What a topic takes: the parameters of its `run`, and "quick" where it has a smaller run."""
    return (*inspect.signature(find_topic(name).run).parameters, *(["quick"] if TOPICS[name].quick else []))


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
    about = TOPICS[name]
    found = topic.run(**{**(about.quick if quick else {}), **settings})
    claims = {claim: (seen or None) if quick else seen for claim, seen in found.claims.items()}
    report: Report = replace(found, claims=claims, topic=name, question=about.question, formula=about.formula)
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
