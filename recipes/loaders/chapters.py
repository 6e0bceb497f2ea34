"""Chinese novels as one chapter a line: python recipes/loaders/chapters.py NOVEL.txt[.gz] ... > chapters.jsonl

A chapter begins at a line such as 第一回; what is before the first is left out.
"""

import gzip
import json
import re
import sys
from pathlib import Path

CHAPTER = re.compile(r"^\s*第[一二三四五六七八九十百零〇○]+回", re.MULTILINE)


def chapters(text: str) -> list[str]:
    """The chapters of a novel, white space at line ends and empty lines left out."""
    begins = [match.start() for match in CHAPTER.finditer(text)]
    parts = [text[a:b] for a, b in zip(begins, [*begins[1:], len(text)], strict=True)]
    whole = ["\n".join(line.strip() for line in part.splitlines() if line.strip()) + "\n" for part in parts]
    return [part for part in whole if len(part) > 200]  # a table of contents has lines of this form, too


def main(paths: list[str]) -> None:
    """Print the chapters of every file."""
    for path in map(Path, paths):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for part in chapters(data.decode("utf-8-sig")):
            print(json.dumps({"text": part}, ensure_ascii=False))


if __name__ == "__main__":
    main(sys.argv[1:])
