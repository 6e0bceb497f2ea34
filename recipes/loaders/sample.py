"""Some lines of a file, in their order: python recipes/loaders/sample.py FILE[.gz] COUNT [SEED] > sample.jsonl"""

import gzip
import random
import sys
from collections.abc import Sequence
from pathlib import Path


def sample(lines: Sequence[bytes], count: int, seed: int = 0) -> list[bytes]:
    """`count` of the lines, every one as likely as another."""
    return [lines[i] for i in sorted(random.Random(seed).sample(range(len(lines)), count))]


if __name__ == "__main__":
    data = Path(sys.argv[1]).read_bytes()
    every = (gzip.decompress(data) if sys.argv[1].endswith(".gz") else data).splitlines(keepends=True)
    sys.stdout.buffer.writelines(sample(every, int(sys.argv[2]), int((sys.argv[3:] or ["0"])[0])))
