"""Questions about meetings and the turns that bear on them (Zhong et al. 2021, QMSum), one record a line:

    python recipes/loaders/qmsum.py train.jsonl[.gz] > qmsum-train.jsonl          # or the published train/*.json

A record has the form of SQuAD: the context is the whole meeting, one turn a line, and every turn of the evidence is an
answer. Questions about a whole meeting have no evidence and are left out.
"""

import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOISE = re.compile(r"\{[^{}]*\}")  # {vocalsound}, {disfmarker}


def meetings(path: str) -> Iterator[dict[str, Any]]:
    """The meetings of a file: JSON, or one on each line."""
    data = Path(path).read_bytes()
    text = (gzip.decompress(data) if path.endswith(".gz") else data).decode("utf-8")
    lines = text.splitlines() if ".jsonl" in path else [text]
    return (json.loads(line) for line in lines if line.strip())


def turns(meeting: dict[str, Any]) -> list[str]:
    """Who says what."""
    spoken = ((turn["speaker"], NOISE.sub(" ", turn["content"])) for turn in meeting["meeting_transcripts"])
    return [" ".join(f"{speaker}: {text}".split()) for speaker, text in spoken]


def questions(meeting: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The records of a meeting."""
    said = turns(meeting)
    starts = [0]
    for turn in said:
        starts.append(starts[-1] + len(turn) + 1)
    for query in meeting["specific_query_list"]:
        spans = [range(int(first), int(last) + 1) for first, last in query["relevant_text_span"]]
        numbers = sorted({i for span in spans for i in span if i < len(said)})
        answers = [{"text": said[i], "answer_start": starts[i]} for i in numbers]
        if answers:
            yield {"question": query["query"], "context": "\n".join(said), "answers": answers}


if __name__ == "__main__":
    for file in sys.argv[1:]:
        for one in meetings(file):
            for record in questions(one):
                print(json.dumps(record, ensure_ascii=False))
