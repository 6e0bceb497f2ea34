"""`headway explain [TOPIC]`: answers a question about attention by a run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from headway.cli._shared import note, print_report, progress, set_threads
from headway.errors import ConfigError
from headway.language import LANGUAGES, Translation, check_language, language_of_environment
from headway.report import duration
from headway_lab.explain import TOPICS, explain, option
from headway_lab.explain.tables import translation
from headway_lab.explain.topics import groups
from headway_lab.questions import Index, Match, entries, language_of

LONG = 10  # seconds from which on a run shows its progress


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
    model: str | None = None,
    prompt: str | None = None,
    quick: bool = False,
    lang: str | None = None,
    json: bool = False,
    threads: int | None = None,
) -> None:
    """Answer a question about attention by a run: formula, numbers, figure, verdict. Without a topic: list the topics.
    A topic refuses a setting that it does not take, and says which it takes.

    topic: the question's name; all for the book of all topics, or figures for drawings of models and steps, in English
        and Chinese; none lists the topics
    question: a question in words, English or Chinese: prints which topics answer it, and how
    out: folder for TOPIC.png and TOPIC.csv, for the book, en.html and zh.html, or for figures, NAME.en.svg and
        NAME.zh.svg
    heads: query heads (heads)
    kv_heads: key/value heads (heads)
    n: tokens (complexity)
    d: width (complexity)
    k: tokens of a convolution kernel (complexity)
    r: keys of a window (complexity)
    context: tokens of the longest row (heads, cache, memory)
    steps: training steps (topics that train); decoding steps (figures --model) [default: 4]
    seeds: two or more, as 0,1,2
    model: a folder or a name of the Hub: draws the decoding steps of this model as it continues a prompt, and what each
        step computes, without a cache and with one (figures)
    prompt: the prompt that the model continues (figures)
    quick: a smaller run of a topic that takes long; other topics run as usual
    lang: language of sentences, labels and figures, en or zh [default: that of LC_ALL, LC_MESSAGES or LANG]. Questions
        are answered in their own language; figures of the documents are written in both, and so is the book by default
    """
    language = language_of_environment() if lang is None else check_language(lang, "explain --lang")
    say = translation(language)
    with errors_in(say):
        if question is not None:
            others = (topic, heads, kv_heads, n, d, k, r, context, steps, seeds, model, prompt, out)
            if quick or any(other is not None for other in others):
                raise ConfigError("explain: --question takes no topic and no setting; give it alone")
            matches = ask(question)
            print_report({"question": question, "found": matches}, to_text(matches), json)
            return
        sizes = {"heads": heads, "kv_heads": kv_heads, "n": n, "d": d, "k": k, "r": r}
        sizes = {**sizes, "context": context, "steps": steps}
        settings: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
        if seeds is not None:
            settings["seeds"] = numbers(seeds)
        if model is not None or prompt is not None:
            if topic != "figures" or model is None or prompt is None or quick or {*settings} - {"steps"}:
                raise ConfigError(
                    "explain: --model and --prompt need each other and topic figures, and take only --steps and --out"
                )
            set_threads(threads)
            languages = LANGUAGES if lang is None else (language,)
            steps = 4 if steps is None else steps
            print_report(*decoding(model, prompt, steps, out, languages, language), json)
            return
        if settings and topic in (None, "all", "figures"):
            options = ", ".join(map(option, settings))
            raise ConfigError(
                f"explain: {options} can be used with a single topic only, got {topic or 'no topic'}"
            )
        if quick and topic is None:
            raise ConfigError("explain: --quick needs a topic, or all")
        if quick and topic == "figures":
            raise ConfigError("explain: --quick does not apply to figures; leave it out")
        if topic is None and out is not None:
            raise ConfigError("explain: --out needs a topic, all or figures")
        if topic is None:
            print_report(listing(language), "\n".join(list_lines(language)), json)
            return
        set_threads(threads)
        if topic in ("figures", "all"):
            written = [
                str(path) for path in write(topic, out, quick, LANGUAGES if lang is None else (language,))
            ]
            print_report({"written": written}, say.fill("written: {files}", files=", ".join(written)), json)
            return
        seconds = TOPICS[topic].seconds if topic in TOPICS else 0
        time = duration(seconds)
        if quick and topic in TOPICS and not TOPICS[topic].quick:
            note(say(f"{topic}: {time} of one core, and no smaller run"))
        under_way = (
            say(f"{topic}: about {time} of one core")
            if quick
            else say(f"{topic}: about {time} of one core, with --quick less")
        )
        with progress(under_way) if seconds >= LONG else nullcontext():
            report = explain(topic, out, quick=quick, language=language, **settings)
        print_report(report.to_json(), report.to_text(), json)


@contextmanager
def errors_in(say: Translation) -> Iterator[None]:
    """Translates the ConfigErrors raised inside the block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(say(str(error))) from error


def write(topic: str, out: Path | None, quick: bool, languages: Sequence[str]) -> list[Path]:
    """Writes the figures of the documents (in all languages) or the book (in `languages`), and returns the files.
    Raises ConfigError without a folder."""
    if topic == "figures":
        from headway_lab.diagrams import write as write_figures

        if out is None:
            raise ConfigError("explain figures writes pictures: give --out FOLDER")
        return write_figures(out)
    from headway_lab.book import write_books

    if out is None:
        raise ConfigError("explain all writes a book: give --out FOLDER")
    return write_books(out, languages=languages, quick=quick, say=note)


def decoding(
    model: str, prompt: str, count: int, out: Path | None, languages: Sequence[str], language: str
) -> tuple[dict[str, Any], str]:
    """Returns the decoding steps of a model that continues a prompt, for JSON and as text for a terminal; with a
    folder, also draws them there."""
    from headway import load
    from headway_lab.diagrams import labels, write_svg
    from headway_lab.diagrams.steps import growing_cache, steps_of, text_of

    steps = steps_of(load(model, task="causal-lm"), prompt, count)
    written = []
    if out is not None:
        drawings = {name: growing_cache(labels("cache", name), steps) for name in languages}
        written = [str(write_svg(out, "cache", name, drawing)) for name, drawing in drawings.items()]
    lines = [text_of(labels("cache", language), steps)]
    lines += [translation(language).fill("written: {files}", files=", ".join(written))] if written else []
    return {"steps": steps, "written": written}, "\n".join(lines)


def numbers(text: str) -> tuple[int, ...]:
    """Parses numbers between commas: "0,1,2". Raises ConfigError for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"explain: --seeds takes numbers between commas, as 0,1,2; got {text!r}") from None


def listing(language: str = "en") -> dict[str, dict[str, Any]]:
    """Returns the question, the group, and the seconds on one core of each topic."""
    return {
        name: {"question": topic.question, "group": group, "seconds": topic.seconds}
        for group, topics in groups(language).items()
        for name, topic in topics.items()
    }


def list_lines(language: str = "en") -> list[str]:
    """Returns the lines of the topic list for a terminal, by group."""
    widest = max(map(len, TOPICS))
    lines = [translation(language)("time of one core; --quick makes the longer ones short")]
    for group, topics in groups(language).items():
        lines += ["", group]
        lines += [
            f"  {name:<{widest}}  {duration(t.seconds):>10}  {t.question}" for name, t in topics.items()
        ]
    return lines


def ask(question: str) -> tuple[Match, ...]:
    """Returns the entries that answer a question, best first. Raises ConfigError if none does."""
    matches = Index(entries(language_of(question))).find(question)
    if not matches:
        raise ConfigError(
            f"explain: no topic answers {question!r}; rephrase it, or list the topics with `headway explain`"
        )
    return matches


def to_text(matches: tuple[Match, ...]) -> str:
    """Returns the best entry with its answer, verdict and command, and references to the other entries."""
    best, *other_entries = (match.entry for match in matches)
    say = translation(language_of(best.answer))
    lines = [f"{best.topic}: {best.answer}"]
    lines += [f"{say('measured')}: {best.verdict}"] if best.verdict else []
    lines += [f"{say('run')}: {best.command}"]
    lines += [f"{say('see also')}: {entry.command}   ({entry.ask[0]})" for entry in other_entries]
    return "\n".join(lines)
