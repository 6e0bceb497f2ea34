"""`headway explain [TOPIC]`: a question about attention, answered by a run."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from headway.cli._progress import progress
from headway.cli._shared import note, print_report, set_threads
from headway.errors import ConfigError
from headway.report import duration
from headway_lab.explain import GROUPS, TOPICS, explain, option
from headway_lab.questions import LANGUAGES, Index, Match, entries, language_of

LONG = 10  # seconds, from which on it is said that a run is under way


def command(
    topic: str | None = None,
    *,
    question: str | None = None,
    out: Path | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    n: int | None = None,
    d: int | None = None,
    k: int | None = None,
    r: int | None = None,
    context: int | None = None,
    steps: int | None = None,
    seeds: str | None = None,
    quick: bool = False,
    json: bool = False,
    threads: int | None = None,
) -> None:
    """Answer a question about attention by a run: formula, numbers, figure, verdict. Without a topic: the list of
    them. A topic that does not take a setting refuses it, and says which it takes.

    topic: which question; all, the book of them, or figures, drawings of models and steps, in English and Chinese; none
        lists them
    question: in words, English or Chinese: which topics answer, and how
    out: folder for TOPIC.png and TOPIC.csv, for the book, en.html and zh.html, or for figures, NAME.en.svg and
        NAME.zh.svg
    heads: query heads (heads)
    kv_heads: key/value heads (heads)
    n: tokens (complexity)
    d: width (complexity)
    k: tokens of a kernel (complexity)
    r: keys of a window (complexity)
    context: tokens of the longest row (heads, cache, memory)
    steps: of training (topics that train)
    seeds: two or more, as 0,1,2
    quick: a smaller run of a topic that takes long; of others the run itself
    """
    if question is not None:
        if topic is not None or out is not None or quick:
            raise ConfigError("explain: --question finds a topic and says its command; give it alone")
        found = ask(question)
        print_report({"question": question, "found": found}, to_text(found), json)
        return
    sizes = {"heads": heads, "kv_heads": kv_heads, "n": n, "d": d, "k": k, "r": r}
    sizes = {**sizes, "context": context, "steps": steps}
    settings: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    if seeds is not None:
        settings["seeds"] = numbers(seeds)
    if settings and topic in (None, "all", "figures"):
        given = ", ".join(map(option, settings))
        raise ConfigError(f"explain: {given} is of a single topic; got it with {topic or 'no topic'}")
    if quick and topic is None:
        raise ConfigError("explain: --quick is of a topic, or of all; got it with no topic")
    if quick and topic == "figures":
        raise ConfigError("explain: --quick is of a topic, or of all; figures take a second")
    if topic is None:
        print_report(listing(), "\n".join(list_lines()), json)
        return
    set_threads(threads)
    if topic == "figures":
        from headway_lab.diagrams import write

        if out is None:
            raise ConfigError("explain figures writes pictures: give --out FOLDER")
        written = [str(path) for path in write(out)]
        print_report({"written": written}, f"written: {', '.join(written)}", json)
        return
    if topic == "all":
        from headway_lab.book import write_book

        if out is None:
            raise ConfigError("explain all writes a book: give --out FOLDER")
        written = [str(write_book(out, language, quick=quick, say=note)) for language in LANGUAGES]
        print_report({"written": written}, f"written: {', '.join(written)}", json)
        return
    seconds = TOPICS[topic].seconds if topic in TOPICS else 0
    if quick and topic in TOPICS and not TOPICS[topic].quick:
        note(f"{topic}: {duration(seconds)} of one core, and no smaller run")
    less = "" if quick else ", with --quick less"
    under_way = f"{topic}: about {duration(seconds)} of one core{less}"
    with progress(under_way) if seconds >= LONG else nullcontext():
        report = explain(topic, out, quick=quick, **settings)
    print_report(report.to_json(), report.to_text(), json)


def numbers(text: str) -> tuple[int, ...]:
    """Numbers between commas: "0,1,2". Raises ConfigError for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"explain: --seeds takes numbers between commas, as 0,1,2; got {text!r}") from None


def listing() -> dict[str, dict[str, Any]]:
    """What is asked, the group, and the seconds of one core, by topic."""
    return {
        name: {"question": topic.question, "group": group, "seconds": topic.seconds}
        for group, topics in GROUPS.items()
        for name, topic in topics.items()
    }


def list_lines() -> list[str]:
    """The list of topics for a terminal, by group."""
    width = max(map(len, TOPICS))
    lines = ["time of one core; --quick makes the longer ones short"]
    for group, topics in GROUPS.items():
        lines += ["", group]
        lines += [f"  {name:<{width}}  {duration(t.seconds):>10}  {t.question}" for name, t in topics.items()]
    return lines


def ask(question: str) -> tuple[Match, ...]:
    """The entries that answer a question, the best first. Raises ConfigError where none does."""
    found = Index(entries(language_of(question))).find(question)
    if not found:
        raise ConfigError(
            f"explain: no topic answers {question!r}; ask about attention, positions, norms, caches or models in other "
            "words, or see the list of `headway explain`"
        )
    return found


def to_text(found: tuple[Match, ...]) -> str:
    """The best entry with its answer and command, and which others there are."""
    best, *others = found
    labels = ("run", "see also") if language_of(best.entry.answer) == "en" else ("运行", "另见")
    lines = [f"{best.entry.topic}: {best.entry.answer}", f"{labels[0]}: {best.entry.command}"]
    lines += [f"{labels[1]}: {one.entry.command}   ({one.entry.ask[0]})" for one in others]
    return "\n".join(lines)
