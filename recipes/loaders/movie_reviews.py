"""Reviews of the movie review data (Pang and Lee 2004) with their polarity, one record a line:

    python recipes/loaders/movie_reviews.py movie_reviews.zip train|dev|test > reviews-train.jsonl

The numbers in the names of the files are the splits: cv000 to cv799 train, cv800 to cv899 dev, the rest test.
"""

import json
import re
import sys
import zipfile
from collections.abc import Iterator

NAME = re.compile(r"(neg|pos)/cv(\d{3})_\w+\.txt$")
SPLITS = {"train": range(800), "dev": range(800, 900), "test": range(900, 1000)}


def reviews(path: str, split: str) -> Iterator[dict[str, str]]:
    """The records of a split."""
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            found = NAME.search(name)
            if found and int(found[2]) in SPLITS[split]:
                yield {"text": " ".join(archive.read(name).decode("latin-1").split()), "label": found[1]}


if __name__ == "__main__":
    for record in reviews(*sys.argv[1:3]):
        print(json.dumps(record))
