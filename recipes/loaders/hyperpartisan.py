"""Articles of the hyperpartisan news data (Kiesel et al. 2019, SemEval 2019 task 4), one record a line:

python recipes/loaders/hyperpartisan.py articles.xml[.gz] ground_truth.xml[.gz] > hyperpartisan.jsonl
"""

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree


def articles(texts: str, truth: str) -> Iterator[dict[str, str]]:
    """Title and text of each article, without tags, and whether it is hyperpartisan: "true" or "false"."""
    labels = {one.get("id"): one.get("hyperpartisan") for one in _read(truth).iter("article")}
    for article in _read(texts).iter("article"):
        words = f"{article.get('title', '')} {' '.join(article.itertext())}".split()
        yield {"text": " ".join(words), "label": str(labels[article.get("id")])}


def _read(path: str) -> ElementTree.Element:
    data = Path(path).read_bytes()
    return ElementTree.fromstring(gzip.decompress(data) if path.endswith(".gz") else data)


if __name__ == "__main__":
    for record in articles(*sys.argv[1:3]):
        print(json.dumps(record))
