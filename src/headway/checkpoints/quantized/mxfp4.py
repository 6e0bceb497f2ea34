"""MXFP4: numbers of 4 bits, 32 of a row with one power of two (OCP Microscaling Formats 1.0, 2023, section 5.3), as
gpt-oss's experts are stored. They are read as the numbers that they stand for, which bf16 holds exactly.

    NAME_blocks   uint8 [E, O, I / 32, 16], two numbers each, the first in the low bits: a sign, and E2M1 (`VALUES`)
    NAME_scales   uint8 [E, O, I / 32], exponents of 2, with 127 added

stand for NAME [E, I, O].
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.errors import CheckpointError
from headway.storage.lazy import Form, LazyTensors, Made

BLOCK = 32
BLOCKS, SCALES = "_blocks", "_scales"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpacked(tensors: LazyTensors, path: Path) -> LazyTensors:
    """The tensors of a folder with the matrices that its blocks and scales stand for, made when asked for.

    Raises CheckpointError for blocks without scales, scales without blocks, and others than these."""
    names = {name.removesuffix(end) for name in tensors for end in (BLOCKS, SCALES) if name.endswith(end)}
    made = {name: _form(name, tensors.forms, path) for name in sorted(names)}
    hidden = {f"{name}{end}" for name in made for end in (BLOCKS, SCALES)}
    there = {name: form for name, form in tensors.forms.items() if name not in hidden}

    def part(name: str, box: tuple[slice, ...]) -> Tensor:
        if name not in made:
            return tensors.part(name, box)
        found = []
        for end in (BLOCKS, SCALES):
            _, *inner = tensors.forms[f"{name}{end}"].shape
            found.append(tensors.part(f"{name}{end}", (box[0], *(slice(0, size) for size in inner))))
        return numbers(*found).transpose(-1, -2)[(slice(None), *box[1:])]

    def whole(name: str) -> Tensor:
        return (
            part(name, tuple(slice(0, size) for size in made[name].shape)) if name in made else tensors[name]
        )

    def copy(name: str, target: Tensor) -> None:
        if name in made:
            target.copy_(whole(name))
        else:
            tensors.copy_into(name, target)

    return Made({**there, **made}, whole, copy, part)


def numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., I / 32, 16] and [..., I / 32] -> bf16 [..., I]."""
    values = torch.tensor([*VALUES, *(-value for value in VALUES)])
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)
    halves = F.embedding(blocks.int(), pairs).flatten(-2)
    return torch.ldexp(halves, scales[..., None].int() - 127).flatten(-2).to(torch.bfloat16)


def _form(name: str, forms: Mapping[str, Form], path: Path) -> Form:
    blocks, scales = (forms.get(f"{name}{end}") for end in (BLOCKS, SCALES))
    if blocks is None or scales is None:
        raise CheckpointError(f"{path}: {name} has {BLOCKS} without {SCALES}, or the other way round")
    if (
        {blocks.dtype, scales.dtype} != {torch.uint8}
        or len(blocks.shape) != 4
        or blocks.shape[-1] != BLOCK // 2
        or scales.shape != blocks.shape[:-1]
    ):
        raise CheckpointError(
            f"{path}: {name} in mxfp4 is uint8 {BLOCKS} [experts, outputs, groups, {BLOCK // 2}] and {SCALES} without "
            f"the last axis, got {blocks.dtype} {list(blocks.shape)} and {scales.dtype} {list(scales.shape)}"
        )
    experts, outputs, groups, _ = blocks.shape
    return Form((experts, groups * BLOCK, outputs), torch.bfloat16)
