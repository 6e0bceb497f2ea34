"""Readers of published data sets, which turn their files into texts and records that `headway.data` reads.

Each function takes files, which may be compressed with gzip, and yields pieces of text or records."""

import gzip
import json
import random
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from headway.data.values import values
from headway.errors import DataError, as_error

Files = Sequence[Path]
Record = Mapping[str, Any]
CHAPTER = re.compile(r"^\s*第[一二三四五六七八九十百零〇○]+回", re.MULTILINE)
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGITS = {str(digit): name for digit, name in enumerate(NAMES)}
REVIEW = re.compile(r"(neg|pos)/cv(\d{3})_\w+\.txt$")
REVIEWS = {"train": range(800), "dev": range(800, 900), "test": range(900, 1000)}
TURN, ROLES = re.compile(r"### (Human|Assistant):"), {"Human": "human", "Assistant": "gpt"}
NOISE = re.compile(r"\{[^{}]*\}")  # {vocalsound}, {disfmarker}
BROKEN = (
    OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error, ElementTree.ParseError
)  # fmt: skip
"""Errors raised by reading a file of another format."""
STRETCH = 350
"""Characters of each passage of a triplet: rows of 128 and of 256 tokens read different shares of it, as the published
rows of 512 and of 1024 tokens do of a document, at a quarter of the size."""


def text_of(path: Path) -> str:
    """Returns the decompressed text of a file. Raises DataError if it is not UTF-8, or broken gzip."""
    with as_error(DataError, str(path), *BROKEN):
        raw = path.read_bytes()
        return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the nonempty lines of a file, with their numbers. A line ends at a line feed only: texts may hold U+2028
    or U+0085, at which `str.splitlines` cuts."""
    for number, line in enumerate(text_of(path).split("\n"), 1):
        if line.strip():
            yield number, line


def english(files: Files) -> Iterator[str]:
    """Yields the texts of the files; without files, Python's own help texts (`pydoc_data.topics`)."""
    if files:
        return (f"{text_of(path)}\n" for path in files)
    with as_error(DataError, "Python's help texts are not installed; pass text files", ImportError):
        from pydoc_data.topics import topics
    return (f"{text}\n" for text in topics.values())


def text8(text: str) -> str:
    """Returns a text reduced to a-z and single spaces (Mahoney 2006, "About the test data"): lower case, digits spelled
    out one by one, each run of other characters a space. The published file has this form already and is unchanged."""
    spelled = re.sub(r"\d", lambda digit: f" {DIGITS[digit[0]]} ", text.lower())
    return re.sub(r"[^a-z]+", " ", spelled)


def letters(files: Files) -> Iterator[str]:
    """Yields the texts of `english` in the symbols of text8, with WikiText's <unk> and @-@ replaced first."""
    return (text8(text.replace("<unk>", " ").replace("@-@", "-")) for text in english(files))


def listed(files: Files, keys: Sequence[str]) -> Iterator[str]:
    """Yields each file's JSON list of records, unchanged. Raises DataError if it is not one, or a record lacks a key of
    `keys`."""
    for path in files:
        text = text_of(path)
        with as_error(DataError, f"{path}: not JSON", ValueError, RecursionError):
            records = json.loads(text)
        records_fit = isinstance(records, list) and all(
            isinstance(record, dict) and {*keys} <= record.keys() for record in records
        )
        if not records_fit:
            raise DataError(f"{path}: must be a JSON list of records, each with {', '.join(keys)}")
        yield json.dumps(records, ensure_ascii=False)


def talks(files: Files) -> Iterator[Record]:
    """Returns conversations in English, in ShareGPT's format, from lines of JSON whose `input` is "### Human: ...
    ### Assistant: ... ### Assistant:" and whose `output` is the last answer. Of conversations with the same first
    message, only the longest is kept."""
    longest: dict[str, list[tuple[str, str]]] = {}
    for path in files:
        with as_error(DataError, f"{path}: not lines of JSON with input and output", *BROKEN):
            for row in (json.loads(line) for _, line in lines_of(path)):
                _, *parts = TURN.split(f"{row['input']} {row['output']}")
                turns = [
                    (ROLES[role], text.strip()) for role, text in zip(parts[::2], parts[1::2], strict=True)
                ]
                alternates = [role for role, _ in turns] == ["human", "gpt"] * (len(turns) // 2)
                if (
                    alternates
                    and all(text for _, text in turns)
                    and _is_english(" ".join(text for _, text in turns))
                ):
                    longest[turns[0][1]] = max(longest.get(turns[0][1], []), turns, key=len)
    return (
        {"conversations": [{"from": role, "value": text} for role, text in turns]}
        for turns in longest.values()
    )


def _is_english(text: str) -> bool:
    """Returns whether at least 99 % of the characters are ASCII and 8 % of the words are common English ones."""
    words = re.findall(r"\w+", text.lower())
    common = sum(word in ("the", "of", "and", "to", "is", "a") for word in words)
    return sum(map(str.isascii, text)) >= 0.99 * len(text) and common >= 0.08 * len(words)


def chapters(text: str) -> list[str]:
    """Returns the chapters of a novel, each from a line such as 第一回 on, without empty lines; lines are stripped."""
    begins = [match.start() for match in CHAPTER.finditer(text)]
    parts = [text[a:b] for a, b in zip(begins, [*begins[1:], len(text)], strict=True)] if begins else []
    cleaned = ["\n".join(line.strip() for line in part.splitlines() if line.strip()) + "\n" for part in parts]
    return [part for part in cleaned if len(part) > 200]  # lines of a table of contents match, too


def novels(files: Files) -> Iterator[Record]:
    """Yields a record for each chapter of the novels."""
    return ({"text": part} for path in files for part in chapters(text_of(path)))


def triplets(parts: Sequence[str], length: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yields triplets of passages of `length` characters in the form of CAIL2019-SCM (Xiao et al. 2019): A, B, C, and
    the label of the one that is more like A. Two consecutive passages of a chapter are alike; the third is drawn from
    another chapter. Raises DataError if fewer than two chapters are long enough."""
    rng = random.Random(seed)
    long_chapters = [text for text in parts if len(text) >= 2 * length]
    if len(long_chapters) < 2:
        raise DataError(
            f"triplets need two or more chapters of at least {2 * length} characters, but only {len(long_chapters)} "
            f"of {len(parts)} are that long; pass more novels"
        )
    for number, text in enumerate(long_chapters):
        cuts = [text[at : at + length] for at in range(0, len(text) - length + 1, length)]
        for first, second in zip(cuts[::2], cuts[1::2], strict=False):
            other = long_chapters[(number + rng.randrange(1, len(long_chapters))) % len(long_chapters)]
            at = rng.randrange(len(other) - length + 1)
            unlike, label = other[at : at + length], rng.choice("BC")
            passages = {"B": second, "C": unlike} if label == "B" else {"B": unlike, "C": second}
            yield {"A": first, **passages, "label": label}


def ranked(files: Files) -> Iterable[str | Record]:
    """Returns the published file of triplets unchanged; for novels, which can be used instead, their `triplets`."""
    texts = [text_of(path) for path in files]
    if any(text.lstrip().startswith("{") for text in texts):
        return texts
    return triplets([part for text in texts for part in chapters(text)], STRETCH)


def titles(files: Files) -> Iterator[str]:
    """Yields the decompressed texts of files with text TAB label on each line. Raises DataError for a line without a
    tab."""
    for path in files:
        for number, line in lines_of(path):
            if "\t" not in line:
                raise DataError(f"{path}, line {number}: must be text TAB label, got {line[:40]!r}")
        yield text_of(path)


def reviews(files: Files, split: str) -> Iterator[Record]:
    """Yields the records of a split of the movie reviews (Pang and Lee 2004); the numbers in the file names decide the
    split."""
    for path in files:
        with as_error(DataError, str(path), *BROKEN), zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                match = REVIEW.search(name)
                if match and int(match[2]) in REVIEWS[split]:
                    text = " ".join(archive.read(name).decode("latin-1").split())
                    yield {"text": text, "label": match[1]}


def sampled(files: Files, count: int, seed: int = 0) -> Iterator[str]:
    """Returns `count` of the records, one JSON object per line, drawn uniformly by `seed` and in their order; all if
    there are fewer. Raises DataError for a line of another form."""
    lines = []
    for path in files:
        for number, line in lines_of(path):
            with as_error(DataError, f"{path}, line {number}", ValueError):
                record = json.loads(line)
            if not isinstance(record, dict):
                raise DataError(f"{path}, line {number}: must be a JSON object, got {line[:40]!r}")
            lines.append(f"{line}\n")
    chosen = random.Random(seed).sample(range(len(lines)), min(count, len(lines)))
    return (lines[i] for i in sorted(chosen))


def articles(files: Files) -> Iterator[Record]:
    """Yields title and text of each article of the hyperpartisan news (Kiesel et al. 2019), without tags, labelled
    "true" or "false" (whether it is hyperpartisan). Raises DataError unless there are two files: articles and
    labels."""
    if len(files) != 2:
        raise DataError(
            f"hyperpartisan news needs two files, the articles and then their labels; got {len(files)}"
        )
    with as_error(DataError, " and ".join(map(str, files)), *BROKEN):
        texts, truth = (ElementTree.fromstring(text_of(path)) for path in files)
    labels = {x.get("id"): x.get("hyperpartisan") for x in truth.iter("article") if x.get("hyperpartisan")}
    for article in texts.iter("article"):
        words = f"{article.get('title', '')} {' '.join(article.itertext())}".split()
        with as_error(DataError, f"{files[1]}: no label (hyperpartisan) for the article of id", KeyError):
            label = str(labels[article.get("id")])
        yield {"text": " ".join(words), "label": label}


def meetings(files: Files) -> Iterator[Record]:
    """Yields the questions about the meetings of QMSum (Zhong et al. 2021), from files of JSON or JSONL with one
    meeting per value. Raises DataError for a value of another form."""
    for path in files:
        for place, meeting in values(path):
            with as_error(DataError, f"{place}: not a meeting of QMSum", *BROKEN):
                of_meeting = [*questions(meeting)]
            yield from of_meeting


def questions(meeting: Record) -> Iterator[Record]:
    """Yields the questions of a meeting in the form of SQuAD: the context is the whole meeting, one turn per line, and
    each turn that is relevant to the question is an answer. Questions about the whole meeting are left out."""
    cleaned = ((turn["speaker"], NOISE.sub(" ", turn["content"])) for turn in meeting["meeting_transcripts"])
    turns = [" ".join(f"{speaker}: {text}".split()) for speaker, text in cleaned]
    starts = [0]
    for turn in turns:
        starts.append(starts[-1] + len(turn) + 1)
    for query in meeting["specific_query_list"]:
        spans = [range(int(first), int(last) + 1) for first, last in query["relevant_text_span"]]
        relevant = sorted({i for span in spans for i in span if i < len(turns)})
        answers = [{"text": turns[i], "answer_start": starts[i]} for i in relevant]
        if answers:
            yield {"question": query["query"], "context": "\n".join(turns), "answers": answers}
