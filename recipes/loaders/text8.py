"""English text in the 27 symbols of text8: python recipes/loaders/text8.py TEXT[.gz] ... > text8.txt

The rule of text8 (Mahoney 2006, "About the test data"): lower case, digits spelled out one by one, everything that is
not a to z becomes a space, and of spaces in a row one is left. The published file has this form already and comes
through as it is.
"""

import gzip
import re
import sys
from pathlib import Path

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGITS = {str(digit): name for digit, name in enumerate(NAMES)}


def text8(text: str) -> str:
    """The text in a-z and single spaces."""
    spelled = re.sub(r"\d", lambda digit: f" {DIGITS[digit[0]]} ", text.lower())
    return re.sub(r"[^a-z]+", " ", spelled)


def main(paths: list[str]) -> None:
    """Print the text of all files, without a line end."""
    for path in map(Path, paths):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        sys.stdout.write(text8(data.decode("utf-8-sig").replace("<unk>", " ").replace("@-@", "-")))


if __name__ == "__main__":
    main(sys.argv[1:])
