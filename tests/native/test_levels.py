"""Levels compared: those that multiply bytes in another way change no bit, and none uses more than it may."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.block_quantization import PARTS
from headway.native import build, levels
from headway.native.block_panels import BlockPanels
from headway.native.linear import linear
from headway.native.panels import Panels
from headway.quantization import quantize_weights
from tests.native.conftest import EVERY_LEVEL, Use
from tests.native.test_block_panels import drawn
from tests.native.test_linear import DTYPES, FORMS


def products(rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Multiplies rows with weights of every form, with groups that end within a block and with several of them."""
    generator = torch.Generator().manual_seed(rows)
    results = []
    for outputs, inputs in ((33, 96), (50, 1280)):
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        w = torch.randn(outputs, inputs, generator=generator)
        forms = [Panels.pack(quantize_weights(w, bits, group, symmetric=s)) for bits, group, s in FORMS]
        blocks = [BlockPanels.pack(drawn(outputs, inputs, bits)) for bits in PARTS if inputs % 256 == 0]
        results += linear(x, [*forms, *blocks])
    return results


@pytest.mark.parametrize("level", [level for level in levels.STANDS_ON if level in EVERY_LEVEL])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_bytes_are_those_of_the_level_below(use: Use, level: str, dtype: torch.dtype) -> None:
    """Sums of a group are whole numbers, and so do not depend on the order of additions."""
    for rows in (1, 4, 8, 9, 16, 17, 48, 131, 300):
        of_levels = []
        for compared in (level, levels.STANDS_ON[level]):
            use(compared)
            of_levels.append(products(rows, dtype))
        assert all(torch.equal(a, b) for a, b in zip(*of_levels, strict=True)), rows


JUMPS_AND_PADDING = re.compile(r"(notrack |bnd )?(j|call|loop|xbegin)|.*\bnop")
EXTENSIONS = {"-mavx512bf16": "avx512_bf16", "-mavx512vnni": "avx512_vnni", "-mavx512vbmi2": "avx512_vbmi2"}
EXTENSIONS |= {"-mavxvnni": "avx_vnni", "-mamx-tile": "amx_tile", "-mamx-int8": "amx_int8"}


def foreign(library: Path, flags: tuple[str, ...]) -> list[str]:
    """Returns the instructions of a library that the assembler refuses if it only knows x86-64 and `flags`."""
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=True
    ).stdout
    lines = (line.split("\t", 1)[1] for line in listing.splitlines() if line.startswith(" ") and "\t" in line)
    # addresses and constants do not change which instruction it is
    forms = {re.sub(r"0x[0-9a-f]{3,}", "0x100", line.split("#")[0].split("<")[0].strip()) for line in lines}
    # without BMI1 these bytes are `rep bsf`, which gives the same unless the operand is 0: compilers rely on that
    forms = {form.replace("tzcnt", "bsf") for form in forms if form and not JUMPS_AND_PADDING.match(form)}
    assert len(forms) > 1000 or library.stat().st_size < 1 << 17
    known = "+".join(["generic64", "ibt", *(EXTENSIONS.get(flag, flag[2:]) for flag in flags)])
    # every processor with AVX2 has these
    known += "+sse4.2+popcnt+lzcnt" if flags else ""
    result = subprocess.run(
        ["as", f"-march={known}", "-o", os.devnull, "-"],
        input="\n".join(sorted(forms)) + "\n",
        capture_output=True,
        text=True,
    )
    return [line for line in result.stderr.splitlines() if "Error" in line]


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("objdump") or platform.machine() != "x86_64", reason="binutils of x86-64"
)
@pytest.mark.parametrize("level", levels.known("x86_64"))
def test_no_library_has_an_instruction_that_its_level_lacks(level: str) -> None:
    path = Path(os.environ.get("HEADWAY_NATIVE_DIR") or build.LIBRARIES) / build.file_name(level)
    if not path.exists():
        pytest.skip(f"{level} is not built")
    assert foreign(path, levels.LEVELS[level]) == []
    for lower in levels.runnable(levels.NEEDS[level], tiles=True)[1:2]:
        assert foreign(path, levels.LEVELS[lower]), f"it could be of level {lower}"
