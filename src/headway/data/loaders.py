"""Published sets, from the files that they are published in, as texts and as records that `headway.data` reads. Each
function takes files, packed by gzip or not, and yields texts, piece by piece, or records."""

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
BROKEN = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, ElementTree.ParseError)
"""Errors that a file of another format raises."""
STRETCH = 350
"""Characters of a passage of a triplet: what rows of 512 tokens are to rows of 1024, in a quarter of the size."""


def text_of(path: Path) -> str:
    """A file as text, unpacked. Raises DataError where it is neither UTF-8 nor gzip."""
    with as_error(DataError, str(path), *BROKEN):
        raw = path.read_bytes()
        return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")


def english(files: Files) -> Iterator[str]:
    """The texts of the files; without files Python's own help texts, `pydoc_data.topics`."""
    if files:
        return (f"{text_of(path)}\n" for path in files)
    with as_error(DataError, "Python's own help texts are not here; give text files", ImportError):
        from pydoc_data.topics import topics
    return (f"{text}\n" for text in topics.values())


def text8(text: str) -> str:
    """A text in a-z and single spaces (Mahoney 2006, "About the test data"): lower case, digits spelled out one by one,
    all else a space, and of spaces in a row one. The published file has this form, and stays as it is."""
    spelled = re.sub(r"\d", lambda digit: f" {DIGITS[digit[0]]} ", text.lower())
    return re.sub(r"[^a-z]+", " ", spelled)


def letters(files: Files) -> Iterator[str]:
    """`english` in the symbols of text8; the <unk> and @-@ of WikiText are left out."""
    return (text8(text.replace("<unk>", " ").replace("@-@", "-")) for text in english(files))


def listed(files: Files, keys: Sequence[str]) -> Iterator[str]:
    """A JSON list of records as it is, unpacked. Raises DataError for anything else, or records without the keys."""
    for path in files:
        with as_error(DataError, str(path), *BROKEN):
            records = json.loads(text_of(path))
        if not isinstance(records, list) or not all(set(keys) <= {*record} for record in records):
            raise DataError(f"{path}: must be a JSON list of records, each with {', '.join(keys)}")
        yield json.dumps(records, ensure_ascii=False)


def talks(files: Files) -> Iterator[Record]:
    """Conversations in English, in ShareGPT's form, from lines of JSON whose `input` is "### Human: ... ### Assistant:
    ... ### Assistant:" and whose `output` is what comes next; of those with one first message the longest."""
    longest: dict[str, list[tuple[str, str]]] = {}
    for path in files:
        with as_error(DataError, str(path), *BROKEN):
            for row in map(json.loads, text_of(path).splitlines()):
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
    """Whether nearly all is ASCII, and 8 % of the words are among the commonest."""
    words = re.findall(r"\w+", text.lower())
    common = sum(word in ("the", "of", "and", "to", "is", "a") for word in words)
    return sum(map(str.isascii, text)) >= 0.99 * len(text) and common >= 0.08 * len(words)


def chapters(text: str) -> list[str]:
    """The chapters of a novel: each from a line such as 第一回 on, without empty lines and spaces at line ends."""
    begins = [match.start() for match in CHAPTER.finditer(text)]
    parts = [text[a:b] for a, b in zip(begins, [*begins[1:], len(text)], strict=True)] if begins else []
    whole = ["\n".join(line.strip() for line in part.splitlines() if line.strip()) + "\n" for part in parts]
    return [part for part in whole if len(part) > 200]  # a table of contents has lines of this form, too


def novels(files: Files) -> Iterator[Record]:
    """The chapters of novels, a record each."""
    return ({"text": part} for path in files for part in chapters(text_of(path)))


def triplets(parts: Sequence[str], length: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Two stretches of each chapter that has them, wherever they do not overlap, and one of another chapter, as
    CAIL2019-SCM has them (Xiao et al. 2019): A, B, C, and which of the two is more like A."""
    rng = random.Random(seed)
    long = [text for text in parts if len(text) >= 2 * length]
    for number, text in enumerate(long):
        cuts = [text[at : at + length] for at in range(0, len(text) - length + 1, length)]
        for first, second in zip(cuts[::2], cuts[1::2], strict=False):
            other = long[(number + rng.randrange(1, len(long))) % len(long)]
            at = rng.randrange(len(other) - length + 1)
            far, label = other[at : at + length], rng.choice("BC")
            near = {"B": second, "C": far} if label == "B" else {"B": far, "C": second}
            yield {"A": first, **near, "label": label}


def ranked(files: Files) -> Iterable[str | Record]:
    """The published file of triplets as it is; of novels, which stand in where it is not at hand, `triplets`."""
    texts = [text_of(path) for path in files]
    if any(text.lstrip().startswith("{") for text in texts):
        return texts
    return triplets([part for text in texts for part in chapters(text)], STRETCH)


def titles(files: Files) -> Iterator[str]:
    """Text TAB label on each line, unpacked. Raises DataError for a line without a tab."""
    for path in files:
        text = text_of(path)
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip() and "\t" not in line:
                raise DataError(f"{path}, line {number}: must be text TAB label, got {line[:40]!r}")
        yield text


def reviews(files: Files, split: str) -> Iterator[Record]:
    """The records of a split of the movie reviews (Pang and Lee 2004), which the numbers in the names of files say."""
    for path in files:
        with as_error(DataError, str(path), *BROKEN), zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                match = REVIEW.search(name)
                if match and int(match[2]) in REVIEWS[split]:
                    text = " ".join(archive.read(name).decode("latin-1").split())
                    yield {"text": text, "label": match[1]}


def sampled(files: Files, count: int, seed: int = 0) -> Iterator[str]:
    """`count` of the lines, every one as likely as another, in their order; all of them where there are fewer."""
    whole = [line for path in files for line in text_of(path).splitlines(keepends=True)]
    chosen = random.Random(seed).sample(range(len(whole)), min(count, len(whole)))
    return (whole[i] for i in sorted(chosen))


def articles(files: Files) -> Iterator[Record]:
    """Title and text of each article of the hyperpartisan news (Kiesel et al. 2019), without tags, and whether it is
    hyperpartisan: "true" or "false". Raises DataError for other than two files: texts, and labels."""
    if len(files) != 2:
        raise DataError(
            f"hyperpartisan news are two files, of articles and of their labels; got {len(files)}"
        )
    with as_error(DataError, " and ".join(map(str, files)), *BROKEN):
        texts, truth = (ElementTree.fromstring(text_of(path)) for path in files)
    labels = {element.get("id"): element.get("hyperpartisan") for element in truth.iter("article")}
    for article in texts.iter("article"):
        words = f"{article.get('title', '')} {' '.join(article.itertext())}".split()
        yield {"text": " ".join(words), "label": str(labels[article.get("id")])}


def meetings(files: Files) -> Iterator[Record]:
    """The questions about the meetings of QMSum (Zhong et al. 2021): JSON, or one meeting on each line."""
    return (question for path in files for _, meeting in values(path) for question in questions(meeting))


def questions(meeting: Record) -> Iterator[Record]:
    """The records of a meeting, in the form of SQuAD: the context is the whole meeting, one turn a line, and every turn
    that bears on the question is an answer. Questions about a whole meeting have none and are left out."""
    spoken = ((turn["speaker"], NOISE.sub(" ", turn["content"])) for turn in meeting["meeting_transcripts"])
    turns = [" ".join(f"{speaker}: {text}".split()) for speaker, text in spoken]
    starts = [0]
    for turn in turns:
        starts.append(starts[-1] + len(turn) + 1)
    for query in meeting["specific_query_list"]:
        spans = [range(int(first), int(last) + 1) for first, last in query["relevant_text_span"]]
        numbers = sorted({i for span in spans for i in span if i < len(turns)})
        answers = [{"text": turns[i], "answer_start": starts[i]} for i in numbers]
        if answers:
            yield {"question": query["query"], "context": "\n".join(turns), "answers": answers}
