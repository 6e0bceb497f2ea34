"""What the assembler refuses of a library's instructions if it knows no more than the flags of a level."""

import os
import re
import subprocess
from pathlib import Path

from headway.native import levels

OBJDUMP, ASSEMBLER = "aarch64-linux-gnu-objdump", "aarch64-linux-gnu-as"
OF_PLACES = re.compile(r"^(b|bl|b\.\w+|cbn?z|tbn?z|adrp?|udf|\.\w+)(\s|$)|<")
"""Instructions that every level has, and data: what follows are addresses."""


ASKS = "__aarch64_"
"""Begins the names of functions of libgcc that ask the processor for what they use."""


def forms(library: Path) -> set[str]:
    """The instructions of a library."""
    listing = subprocess.run(
        [OBJDUMP, "-d", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=True
    ).stdout
    found, function = set(), ""
    for line in listing.splitlines():
        if named := re.match(r"^[0-9a-f]+ <(.*)>:$", line):
            function = named[1]
        elif re.match(r"^ +[0-9a-f]+:\t", line) and not function.startswith(ASKS):
            found.add(re.sub(r"\s*//.*", "", line.split("\t", 1)[1]))
    return {x for x in found if not OF_PLACES.search(x)}


def foreign(instructions: set[str], level: str) -> list[str]:
    march = levels.LEVELS[level] or ("-march=armv8-a",)
    done = subprocess.run(
        [ASSEMBLER, *march, "-o", os.devnull, "-"],
        input="\n".join(sorted(instructions)) + "\n",
        capture_output=True,
        text=True,
    )
    return [line for line in done.stderr.splitlines() if "Error" in line]
