"""The data files of the shipped recipes: a table with one entry per file, and the function that prepares it.

Nothing is downloaded: published data sets are prepared from files that the user has, under the licence of each. English
text without a file is taken from Python's own help texts.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headway.data import loaders
from headway.data.loaders import Files, Record
from headway.errors import ConfigError, DataError, check_known
from headway.storage.files import atomic_write


@dataclass(frozen=True)
class Dataset:
    """A data file that can be prepared.

    Attributes:
        what: its content. files: the published files that it is prepared from; "" if it can be prepared without any.
        source: who published them, and under which name. licence, size: of the published files.
        make: returns the pieces of its text, or its records, each of which becomes a line of JSON.
    """

    what: str
    files: str
    source: str
    licence: str
    size: str
    make: Callable[[Files], Iterable[str | Record]]


PYTHON = "without files: Python's own help texts (pydoc_data)", "Python's (PSF-2.0), or the files'"
NOVELS = (
    "Chinese novels with chapters 第一回 ... (Project Gutenberg, wikisource)",
    "public domain",
    "0.6 to 0.9 M characters",
)
CAIL = "CAIL2019-SCM (github.com/china-ai-law-challenge/CAIL2019) as it is published, or novels in its place"
THUC = "THUCNews, ten classes of titles (thuctc.thunlp.org)", "research only", "10 000 titles, 0.3 MB"
PANG = (
    "movie reviews, polarity 2.0 (Pang and Lee 2004; nltk_data)",
    "CC BY 4.0 as nltk_data says",
    "2 000 reviews, 4 MB",
)
IMDB = (
    "large movie reviews (Maas et al. 2011), as lines of JSON with text and label",
    "none stated; research",
    "25 000 reviews, 13 MB",
)
QMSUM = "QMSum (Zhong et al. 2021; github.com/Yale-LILY/QMSum)", "MIT", "232 meetings, 4 MB"

DATASETS: Mapping[str, Dataset] = {
    "text.txt": Dataset("English text", "", *PYTHON, "0.5 MB", loaders.english),
    "text8.txt": Dataset(
        "English text in 27 symbols", "", *PYTHON, "0.5 MB; text8 itself 100 MB", loaders.letters
    ),
    "alpaca.json": Dataset(
        "instructions with answers",
        "alpaca_data.json[.gz]",
        "Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca), or records of its form",
        "CC BY-NC 4.0",
        "52 002 records, 23 MB",
        partial(loaders.listed, keys=("instruction", "output")),
    ),
    "sharegpt.json": Dataset(
        "conversations of several turns",
        "CONVERSATIONS.json[.gz]",
        "records of ShareGPT's form, as FastChat's data/dummy_conversation.json (github.com/lm-sys/FastChat)",
        "Apache-2.0 (FastChat's)",
        "500 conversations, 0.2 MB",
        partial(loaders.listed, keys=("conversations",)),
    ),
    "oasst.jsonl": Dataset(
        "conversations that people wrote, in English",
        "oa_questions.jsonl[.gz]",
        "of OASST1, as QLoRA's eval/prompts/oa_questions.jsonl has them (github.com/artidoro/qlora)",
        "Apache-2.0",
        "953 rows, 4 MB; 180 conversations",
        loaders.talks,
    ),
    "chapters.jsonl": Dataset("chapters of novels", "NOVEL.txt[.gz] ...", *NOVELS, loaders.novels),
    "triplets.jsonl": Dataset(
        "which of two documents is more like a third",
        "train.json or NOVEL.txt[.gz] ...",
        CAIL,
        "the publisher's; novels public domain",
        "8 964 triplets in all",
        loaders.ranked,
    ),
    "triplets-held.jsonl": Dataset(
        "the same, held out",
        "valid.json or another NOVEL.txt[.gz]",
        CAIL,
        "the publisher's; novels public domain",
        "8 964 triplets in all",
        loaders.ranked,
    ),
    "titles-train.txt": Dataset("short titles with labels", "dev.txt[.gz]", *THUC, loaders.titles),
    "titles-test.txt": Dataset("the same, held out", "test.txt[.gz]", *THUC, loaders.titles),
    "reviews-train.jsonl": Dataset(
        "long reviews with polarity", "movie_reviews.zip", *PANG, partial(loaders.reviews, split="train")
    ),
    "reviews-test.jsonl": Dataset(
        "the same, held out", "movie_reviews.zip", *PANG, partial(loaders.reviews, split="test")
    ),
    "imdb-train.jsonl": Dataset(
        "4 000 shorter reviews", "train.jsonl[.gz]", *IMDB, partial(loaders.sampled, count=4000)
    ),
    "imdb-test.jsonl": Dataset(
        "1 000 held out", "test.jsonl[.gz]", *IMDB, partial(loaders.sampled, count=1000)
    ),
    "hyperpartisan.jsonl": Dataset(
        "news, hyperpartisan or not",
        "articles.xml[.gz] ground_truth.xml[.gz]",
        "SemEval 2019 task 4, by article (Kiesel et al. 2019; zenodo.org/records/1489920)",
        "CC BY 4.0",
        "645 articles, 3 MB",
        loaders.articles,
    ),
    "qmsum-train.jsonl": Dataset(
        "questions about meetings", "train.jsonl[.gz], train/*.json", *QMSUM, loaders.meetings
    ),
    "qmsum-test.jsonl": Dataset(
        "the same, held out", "test.jsonl[.gz], test/*.json", *QMSUM, loaders.meetings
    ),
}
"""Data sets, by the file name that recipes use."""


def prepare(name: str, files: Files, out: Path) -> int:
    """Prepares the data set `name` of `DATASETS` from the published `files`, writes it to `out`, and returns its bytes.

    Raises ConfigError for an unknown name, if files are needed and none are given, and if `out` exists; DataError for
    files of another format, and if they hold no record."""
    check_known(name, DATASETS, "data: there is no data set")
    entry = DATASETS[name]
    if entry.files and not files:
        raise ConfigError(
            f"data {name}: pass the published files {entry.files}: {entry.source} ({entry.licence}; {entry.size})"
        )
    if out.exists():
        raise ConfigError(f"data {name}: {out} exists already; remove it, or choose another --out")
    pieces = entry.make(files)
    text = "".join(x if isinstance(x, str) else f"{json.dumps(x, ensure_ascii=False)}\n" for x in pieces)
    if not text.strip():
        raise DataError(
            f"data {name}: no records in {', '.join(map(str, files))}; expected {entry.files or 'text files'}"
        )
    atomic_write(out, text)
    return len(text.encode())


def made_by(path: Path) -> str:
    """Returns "; `headway data NAME FILES` makes it ..." for a file of `DATASETS`, else the empty string."""
    if path.name not in DATASETS:
        return ""
    entry = DATASETS[path.name]
    command = " ".join(filter(None, ("headway data", path.name, entry.files)))
    return f"; `{command}` makes it: {entry.source} ({entry.licence}; {entry.size})"
