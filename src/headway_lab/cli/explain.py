"""`headway explain [TOPIC]`: a question about attention, answered by a run."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli._shared import JsonOption, ThreadsOption, print_json, print_report, set_threads
from headway.errors import ConfigError
from headway_lab.explain import TOPICS, explain
from headway_lab.questions import Index, Match, entries, language_of


def command(
    topic: Annotated[
        str | None, typer.Argument(help="which question, or all, the book of them; none lists them")
    ] = None,
    question: Annotated[
        str | None,
        typer.Option("--question", help="in words, English or Chinese: which topics answer, and how"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="folder for TOPIC.png and TOPIC.csv, or for the book")
    ] = None,
    lang: Annotated[str | None, typer.Option("--lang", help="en | zh: of the book [default: en]")] = None,
    json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Answer a question about attention by a run: formula, numbers, figure, verdict."""
    if question is not None:
        if (topic, out, lang) != (None, None, None):
            raise ConfigError(
                "explain: --question finds topics and runs none; give it without a topic, --out or --lang"
            )
        found = ask(question)
        print_report({"question": question, "found": found}, to_text(found), json)
        return
    if lang is not None and topic != "all":
        raise ConfigError(
            f"explain: --lang is of the book, `headway explain all`; got it with {topic or 'no topic'}"
        )
    if topic is None:
        if json:
            print_json(TOPICS)
        else:
            width = max(map(len, TOPICS))
            print("\n".join(f"  {name:<{width}}   {about}" for name, about in TOPICS.items()))
        return
    set_threads(threads)
    if topic == "all":
        from headway_lab.book import write_book

        if out is None:
            raise ConfigError("explain all writes a book: give --out FOLDER")
        written = write_book(out, lang or "en")
        print_report({"written": str(written)}, f"written: {written}", json)
        return
    report = explain(topic, out)
    print_report(report.to_json(), report.to_text(), json)


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
