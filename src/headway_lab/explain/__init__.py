"""Questions about attention, each answered by a run.

What topics ask, verify and say is data (`topics`); what answers a topic is a module of its name, or a row of
`contests.CONTESTS`, with

    run(*, seeds=..) -> Iterator[Row]      measures; writes nothing; deterministic for its seeds; its parameters are the
                                           topic's settings, and `headway explain` takes them as options
    judge(rows) -> Report                  claims by key, and the values that sentences are made of; a `run` that
                                           measures more than rows returns its report
    draw(figure, report) -> None           paints the report on a matplotlib figure

`explain(topic, out)` runs it and, when `out` is given, writes `out/TOPIC.csv` (the table) and `out/TOPIC.png`.
"""

import csv
import importlib
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, did_you_mean, listed
from headway_lab.explain.report import Report
from headway_lab.explain.topics import GROUPS as GROUPS
from headway_lab.explain.topics import TOPICS as TOPICS


def find_topic(name: str) -> Any:
    """The module or the contest of that name. Raises ConfigError for a name that does not exist."""
    if name not in TOPICS:
        raise ConfigError(f"no topic {name!r}{did_you_mean(name, TOPICS)}; topics are {', '.join(TOPICS)}")
    from headway_lab.explain.contests import CONTESTS

    return CONTESTS.get(name) or importlib.import_module(f"headway_lab.explain.{name.replace('-', '_')}")


def settings_of(name: str) -> tuple[str, ...]:
    """What a topic takes: the parameters of its `run`, and "quick"."""
    return (*inspect.signature(find_topic(name).run).parameters, "quick")


def explain(name: str, out: Path | None = None, *, quick: bool = False, **settings: Any) -> Report:
    """Run one topic. With `out`, write `out/TOPIC.csv` and `out/TOPIC.png` too.

    Args:
        quick: the topic's smaller run; `settings` come before its own. What it does not show, it is too small to tell.
            Of a topic that takes a few seconds, the run itself.
        settings: as the topic's `run` has them (`settings_of`).
    Raises ConfigError for a topic that does not exist, for a setting that it does not take, and for seeds without a
    spread."""
    topic, taken = find_topic(name), settings_of(name)
    if unknown := [option(key) for key in settings if key not in taken]:
        takes = listed([option(key) for key in taken])
        raise ConfigError(f"explain {name}: the topic takes no {listed(unknown)}; it takes {takes}")
    if small := [f"{option(key)} {value}" for key, value in settings.items() if key != "seeds" and value < 1]:
        raise ConfigError(f"explain {name}: settings are 1 or more, got {listed(small)}")
    if "seeds" in settings and len(set(settings["seeds"])) < 2:
        raise ConfigError(
            f"explain {name}: a spread needs two different seeds or more, got {tuple(settings['seeds'])}"
        )
    smaller = TOPICS[name].quick if quick else {}
    settings = {**smaller, **settings}
    found = judged(topic, **settings)
    claims = {claim: (seen or None) if smaller else seen for claim, seen in found.claims.items()}
    report = told(name, replace(found, claims=claims), **settings)
    if out is None:
        return report
    from headway_lab.draw import saved_figure

    out.mkdir(parents=True, exist_ok=True)
    table_path, figure_path = out / f"{name}.csv", out / f"{name}.png"
    with table_path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([report.columns, *report.cells])
    with saved_figure(figure_path) as figure:
        topic.draw(figure, report)
    return replace(report, figure=figure_path, csv=table_path)


def judged(topic: Any, **settings: Any) -> Report:
    """The report, without sentences, of a run of a topic, which is a module or a contest."""
    found = topic.run(**settings)
    return found if isinstance(found, Report) else topic.judge([*found])


def told(name: str, found: Report, **settings: Any) -> Report:
    """What the run of a topic with these settings found, in sentences (`Topic.told`)."""
    topic = find_topic(name)
    run = inspect.signature(topic.run).bind(**settings)
    run.apply_defaults()
    constants = {key: value for key, value in vars(topic).items() if key.isupper()}
    return TOPICS[name].told(name, found, **{**constants, **run.arguments})


def option(setting: str) -> str:
    """A setting as the command line has it: kv_heads -> --kv-heads."""
    return f"--{setting.replace('_', '-')}"
