"""The instructions of a library that the assembler refuses if it only knows the flags of a level."""

import os
import re
import subprocess
from pathlib import Path

from headway.native import levels

OBJDUMP, ASSEMBLER = "aarch64-linux-gnu-objdump", "aarch64-linux-gnu-as"
OF_PLACES = re.compile(r"^(b|bl|b\.\w+|cbn?z|tbn?z|adrp?|udf|\.\w+)(\s|$)|<")
"""Instructions that every level has, and data: they are followed by addresses."""


ASKS = "__aarch64_"
"""The prefix of functions in libgcc that ask the processor which instructions it has."""


def forms(library: Path) -> set[str]:
    """Returns the instructions of a library."""
    listing = subprocess.run(
        [OBJDUMP, "-d", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=True
    ).stdout
    instructions, function = set(), ""
    for line in listing.splitlines():
        if label := re.match(r"^[0-9a-f]+ <(.*)>:$", line):
            function = label[1]
        elif re.match(r"^ +[0-9a-f]+:\t", line) and not function.startswith(ASKS):
            instructions.add(re.sub(r"\s*//.*", "", line.split("\t", 1)[1]))
    return {x for x in instructions if not OF_PLACES.search(x)}


def foreign(instructions: set[str], level: str) -> list[str]:
    march = levels.LEVELS[level] or ("-march=armv8-a",)
    result = subprocess.run(
        [ASSEMBLER, *march, "-o", os.devnull, "-"],
        input="\n".join(sorted(instructions)) + "\n",
        capture_output=True,
        text=True,
    )
    return [line for line in result.stderr.splitlines() if "Error" in line]
