"""What the assembler refuses of a library's instructions if it knows no more than the flags of a level."""

import os
import re
import subprocess
from pathlib import Path

from headway.native import levels

OBJDUMP, ASSEMBLER = "aarch64-linux-gnu-objdump", "aarch64-linux-gnu-as"
OF_PLACES = re.compile(r"^(b|bl|b\.\w+|cbn?z|tbn?z|adrp?|udf|\.\w+)(\s|$)|<")
"""Instructions that every level has, and data: what follows are addresses."""


def forms(library: Path) -> set[str]:
    """The instructions of a library."""
    listing = subprocess.run(
        [OBJDUMP, "-d", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=True
    ).stdout
    lines = (line.split("\t", 1)[1] for line in listing.splitlines() if re.match(r"^ +[0-9a-f]+:\t", line))
    return {re.sub(r"\s*//.*", "", line) for line in lines if not OF_PLACES.search(line)}


def foreign(instructions: set[str], level: str) -> list[str]:
    march = levels.LEVELS[level] or ("-march=armv8-a",)
    done = subprocess.run(
        [ASSEMBLER, *march, "-o", os.devnull, "-"],
        input="\n".join(sorted(instructions)) + "\n",
        capture_output=True,
        text=True,
    )
    return [line for line in done.stderr.splitlines() if "Error" in line]
