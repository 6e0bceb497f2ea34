"""Questions about attention, each answered by a run.

Questions, claims and sentences of topics are data (`topics`); the code of a topic is a module of its name, or an entry
of `contests.CONTESTS`, with

    run(*, seeds=..) -> Iterator[Row]      measures; writes nothing; deterministic for its seeds; its parameters are the
                                           topic's settings, and options of `headway explain`
    judge(rows) -> Report                  claims by key, and the values that sentences use; a `run` that
                                           measures more than rows returns its report
    draw(figure, report) -> None           draws the report on a matplotlib figure

`explain(topic, out)` runs it and, if `out` is given, writes `out/TOPIC.csv` (the table) and `out/TOPIC.png`.
"""

import csv
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, did_you_mean, listed
from headway.fonts import fonts
from headway.language import check_language
from headway_lab.explain.report import Report
from headway_lab.explain.tables import translation
from headway_lab.explain.topics import GROUPS as GROUPS
from headway_lab.explain.topics import TOPICS as TOPICS
from headway_lab.explain.topics import topics_in


def find_topic(name: str) -> Any:
    """Returns the module or the contest of that name. Raises ConfigError for an unknown name."""
    if name not in TOPICS:
        raise ConfigError(f"no topic {name!r}{did_you_mean(name, TOPICS)}; topics are {', '.join(TOPICS)}")
    from headway_lab.explain.contests import CONTESTS

    return CONTESTS.get(name) or importlib.import_module(f"headway_lab.explain.{name.replace('-', '_')}")


def settings_of(name: str) -> tuple[str, ...]:
    """Returns the settings of a topic: the parameters of its `run`, and "quick"."""
    return (*inspect.signature(find_topic(name).run).parameters, "quick")


def explain(
    name: str, out: Path | None = None, *, quick: bool = False, language: str = "en", **settings: Any
) -> Report:
    """Runs one topic. With `out`, also writes `out/TOPIC.csv` and `out/TOPIC.png`; in Chinese, `out/TOPIC.zh.png`.

    Args:
        quick: the topic's smaller run, whose settings `settings` override; claims that it does not show count as too
            small
            to tell. A topic that takes only seconds runs as usual.
        language: language of the report's sentences and of the figure, one of `headway.language.LANGUAGES`.
        settings: arguments of the topic's `run` (`settings_of`).
    Raises ConfigError for an unknown topic or language, for a setting that the topic does not take, for fewer than two
    different seeds, and, before the run, for a Chinese figure if no font has its characters."""
    check_language(language, f"explain {name}")
    if out is not None:
        check_fonts(language)
    return measure(name, quick=quick, **settings).told(language, out)


def check_fonts(language: str) -> None:
    """Raises ConfigError if a figure in this language cannot be labelled."""
    try:
        fonts(language)
    except ConfigError as error:
        raise ConfigError(f"{error}; or give --lang en") from None


@dataclass(frozen=True)
class Measured:
    """The report of a topic's run, without sentences, and the names that sentences may use: settings and constants."""

    name: str
    report: Report
    known: Mapping[str, Any]

    def told(self, language: str = "en", out: Path | None = None) -> Report:
        """Returns the report in sentences (`Topic.told`); with `out`, also writes its table and its figure."""
        report = topics_in(language)[self.name].told(self.name, self.report, **self.known)
        if out is None:
            return report
        from headway_lab.draw import saved_figure
        from headway_lab.explain.figures import translate

        out.mkdir(parents=True, exist_ok=True)
        table_path, figure_path = out / f"{self.name}.csv", out / figure_name(self.name, language)
        with table_path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([report.columns, *report.cells])
        with saved_figure(figure_path, language=language) as figure:
            find_topic(self.name).draw(figure, report)
            if language != "en":
                translate(figure, translation(language))
        return replace(report, figure=figure_path, csv=table_path)


def figure_name(topic: str, language: str) -> str:
    """Returns the file name of a topic's figure: TOPIC.png, or TOPIC.zh.png in Chinese."""
    return f"{topic}.png" if language == "en" else f"{topic}.{language}.png"


def measure(name: str, *, quick: bool = False, **settings: Any) -> Measured:
    """Runs a topic as `explain` does, and returns the result from which sentences in any language are made."""
    topic, accepted = find_topic(name), settings_of(name)
    if unknown := [option(key) for key in settings if key not in accepted]:
        takes = listed([option(key) for key in accepted])
        raise ConfigError(f"explain {name}: the topic takes no {listed(unknown)}; it takes {takes}")
    if too_small := [
        f"{option(key)} {value}" for key, value in settings.items() if key != "seeds" and value < 1
    ]:
        raise ConfigError(f"explain {name}: settings must be at least 1, got {listed(too_small)}")
    if "seeds" in settings and len(set(settings["seeds"])) < 2:
        raise ConfigError(
            f"explain {name}: --seeds needs at least two different seeds, got {tuple(settings['seeds'])}"
        )
    smaller = TOPICS[name].quick if quick else {}
    settings = {**smaller, **settings}
    report = judged(topic, **settings)
    claims = {claim: (seen or None) if smaller else seen for claim, seen in report.claims.items()}
    return Measured(name, replace(report, claims=claims), known(name, **settings))


def judged(topic: Any, **settings: Any) -> Report:
    """Runs a topic, which is a module or a contest, and returns its report without sentences."""
    result = topic.run(**settings)
    return result if isinstance(result, Report) else topic.judge([*result])


def known(name: str, **settings: Any) -> dict[str, Any]:
    """Returns the names that sentences of a topic may use: its constants, and the settings of a run."""
    topic = find_topic(name)
    run = inspect.signature(topic.run).bind(**settings)
    run.apply_defaults()
    return {**{key: value for key, value in vars(topic).items() if key.isupper()}, **run.arguments}


def option(setting: str) -> str:
    """Returns a setting as a command-line option: kv_heads -> --kv-heads."""
    return f"--{setting.replace('_', '-')}"
