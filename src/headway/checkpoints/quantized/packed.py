"""Quantized layers in the formats of other programs, converted to `QuantizedMatrix`. The tensors of a layer X, whose
words (int32) hold n = 32 / bits codes each:

    pack-quantized   X.weight_packed int32 [O, ceil(I / n)], .weight_scale [O, G], .weight_shape [2] (O, I),
                     .weight_zero_point int32 [ceil(O / n), G] if there are zero points, in words along O
    gptq             X.qweight int32 [I / n, O], words along I; .qzeros int32 [G, ceil(O / n)]; .scales [G, O];
                     .g_idx [I], the group of each input
    awq              X.qweight int32 [I, O / n], words along O in AutoAWQ's order; .qzeros int32 [G, O / n];
                     .scales [G, O]

Experts in mxfp4 (blocks of 32 numbers of 4 bits with one power of two) are dequantized to bf16, which holds them
exactly: X [E, I, O]

    X_blocks         uint8 [E, O, I / 32, 16], two numbers each, the first in the low bits: a sign, and E2M1 (`VALUES`)
    X_scales         uint8 [E, O, I / 32], exponents of 2, plus 127

(vllm-project/compressed-tensors, `compressors/`; Frantar et al.'s and AutoGPTQ's `qlinear`; AutoAWQ's `WQLinear_GEMM`;
OCP Microscaling Formats 1.0, 2023, section 5.3.)

Legend: I inputs, O outputs, G groups of inputs, E experts.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.block_quantization import CodedMatrix
from headway.checkpoints.quantized.scheme import Scheme
from headway.errors import CheckpointError
from headway.quantization import QuantizedMatrix
from headway.storage.lazy import Form, LazyTensors, with_values

Leaves = Mapping[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The i-th 4 bits of a word, from the lowest, hold code AWQ_ORDER[i] of its eight (AutoAWQ, `pack_intweight`)."""


class Packing(NamedTuple):
    """A storage format of quantized layers.

    Attributes:
        leaves: suffixes of a layer's tensors; the first marks a layer as quantized, zero points are last.
        size: returns (O, I), from the forms of the tensors.
        shapes: returns the expected shapes of the tensors, from O, I and G.
        matrix: returns the `QuantizedMatrix`, from the tensors, O and I.
    """

    leaves: tuple[str, ...]
    size: Callable[[Mapping[str, Form], Scheme], tuple[int, int]]
    shapes: Callable[[int, int, int, Scheme], tuple[tuple[int, ...], ...]]
    matrix: Callable[[Leaves, Scheme, int, int], QuantizedMatrix]


def _words(count: int, scheme: Scheme) -> int:
    return -(-count * scheme.bits // 32)


def _packed(leaves: Leaves, scheme: Scheme, outputs: int, inputs: int) -> QuantizedMatrix:
    zero = None
    if scheme.zeros:
        zero = from_words(leaves["weight_zero_point"].T, scheme.bits, outputs).T.contiguous()
    codes = from_words(leaves["weight_packed"], scheme.bits, inputs)
    return _matrix(codes, leaves["weight_scale"], zero, scheme)


def _gptq(leaves: Leaves, scheme: Scheme, outputs: int, inputs: int) -> QuantizedMatrix:
    codes = from_words(leaves["qweight"].T, scheme.bits, inputs)
    # (stored + 1) mod 2^bits in gptq's first version: a stored 15 of 4 bits is 0
    zero = from_words(leaves["qzeros"], scheme.bits, outputs).T + scheme.above & (1 << scheme.bits) - 1
    return _matrix(codes, leaves["scales"].T.contiguous(), zero.contiguous(), scheme)


def _awq(leaves: Leaves, scheme: Scheme, outputs: int, inputs: int) -> QuantizedMatrix:
    place = torch.tensor(AWQ_ORDER).argsort()  # code c of a word is in its 4 bits number place[c]

    def ordered(words: Tensor) -> Tensor:
        codes = from_words(words, scheme.bits, outputs).unflatten(1, (-1, len(AWQ_ORDER)))
        matrix: Tensor = codes[:, :, place].flatten(1).T.contiguous()
        return matrix

    codes, zero = ordered(leaves["qweight"]), ordered(leaves["qzeros"])
    return _matrix(codes, leaves["scales"].T.contiguous(), zero, scheme)


def _matrix(codes: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> QuantizedMatrix:
    if zero is not None and bool((zero == 1 << scheme.bits - 1).all()):
        zero = None  # symmetric quantization, stored with explicit zero points
    return QuantizedMatrix(
        codes, scale, zero, scheme.bits, min(scheme.group or codes.shape[1], codes.shape[1])
    )


PACKINGS: Mapping[str, Packing] = {
    "pack-quantized": Packing(
        ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
        lambda forms, scheme: (forms["weight_packed"].shape[0], 0),
        lambda o, i, g, scheme: ((o, _words(i, scheme)), (o, g), (2,), (_words(o, scheme), g)),
        _packed,
    ),
    "gptq": Packing(
        ("qweight", "scales", "g_idx", "qzeros"),
        lambda forms, scheme: (forms["qweight"].shape[1], forms["qweight"].shape[0] * 32 // scheme.bits),
        lambda o, i, g, scheme: ((_words(i, scheme), o), (g, o), (i,), (g, _words(o, scheme))),
        _gptq,
    ),
    "awq": Packing(
        ("qweight", "scales", "qzeros"),
        lambda forms, scheme: (forms["qweight"].shape[1] * 32 // scheme.bits, forms["qweight"].shape[0]),
        lambda o, i, g, scheme: ((i, _words(o, scheme)), (g, o), (g, _words(o, scheme))),
        _awq,
    ),
}
FLOATS = torch.float32, torch.bfloat16, torch.float16


class PackedLayer(NamedTuple):
    """A layer whose matrix [O, I] is stored as codes: shape and dequantized dtype, name of the codes, and reader."""

    form: Form
    kept: str
    read: Callable[[], CodedMatrix]


def packed_layers(tensors: LazyTensors, scheme: Scheme, path: Path) -> dict[str, PackedLayer]:
    """Returns the quantized layers of a folder by their names in the file; weights are not read yet.

    Raises CheckpointError if there are none, for tensors that are missing or misshapen, and for groups of inputs that
    are not contiguous (gptq's desc_act)."""
    packing = PACKINGS[scheme.form]
    mark = f".{packing.leaves[0]}"
    names = [name.removesuffix(mark) for name in tensors if name.endswith(mark)]
    if not names:
        raise CheckpointError(
            f"{path}: config.json describes weights quantized as {scheme}, but there is no tensor *{mark}"
        )
    return {name: _layer(tensors, name, packing, scheme, path) for name in names}


def _layer(tensors: LazyTensors, name: str, packing: Packing, scheme: Scheme, path: Path) -> PackedLayer:
    leaves = [leaf for leaf in packing.leaves if scheme.zeros or leaf != "weight_zero_point"]
    leaves = [leaf for leaf in leaves if leaf != "g_idx" or f"{name}.g_idx" in tensors.forms]
    if lost := [leaf for leaf in leaves if f"{name}.{leaf}" not in tensors.forms]:
        raise CheckpointError(f"{path}: {name} is quantized as {scheme}, but {name}.{lost[0]} is missing")
    forms = {leaf: tensors.forms[f"{name}.{leaf}"] for leaf in leaves}
    first, scales = forms[leaves[0]], forms[leaves[1]]
    if len(first.shape) != 2 or first.dtype != torch.int32 or scales.dtype not in FLOATS:
        raise CheckpointError(
            f"{path}: {name}.{leaves[0]} is {first.dtype} {list(first.shape)} with scales of {scales.dtype}, but "
            f"{scheme} has a matrix of {torch.int32} with scales of float32, bfloat16 or float16"
        )
    outputs, inputs = packing.size(forms, scheme)
    if "weight_shape" in leaves and forms["weight_shape"].shape == (2,):
        outputs, inputs = map(int, tensors[f"{name}.weight_shape"].tolist())
    groups = 1 if scheme.group is None else -(-inputs // scheme.group)
    expected = dict(zip(packing.leaves, packing.shapes(outputs, inputs, groups, scheme), strict=True))
    for leaf, form in forms.items():
        if form.shape != expected[leaf]:
            raise CheckpointError(
                f"{path}: {name}.{leaf} has shape {list(form.shape)}, but {outputs} outputs of {inputs} inputs as "
                f"{scheme} need {list(expected[leaf])}: the file or its config.json is damaged"
            )
    if "g_idx" in leaves:
        group = torch.arange(inputs) // (scheme.group or inputs)
        if not torch.equal(tensors[f"{name}.g_idx"].long(), group):
            raise CheckpointError(
                f"{path}: the groups of {name} are not of consecutive inputs (g_idx; desc_act without static_groups), "
                "which is unsupported; use a checkpoint with desc_act: false or static_groups: true"
            )
    return PackedLayer(
        Form((outputs, inputs), scales.dtype),
        str(scheme),
        lambda: packing.matrix({leaf: tensors[f"{name}.{leaf}"] for leaf in leaves}, scheme, outputs, inputs),
    )


def dequantized(tensors: LazyTensors, layers: Mapping[str, PackedLayer], scheme: Scheme) -> LazyTensors:
    """Returns the tensors of a folder with one weight [O, I] for each quantized layer, dequantized when it is read."""
    hidden = {f"{name}.{leaf}" for name in layers for leaf in PACKINGS[scheme.form].leaves}
    weights = {f"{name}.weight": layer for name, layer in layers.items()}
    return with_values(
        tensors.renamed({name: name for name in tensors if name not in hidden}),
        {name: layer.form for name, layer in weights.items()},
        lambda name: weights[name].read().dequantize(weights[name].form.dtype),
    )


def to_leaves(matrix: QuantizedMatrix, scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the tensors of a matrix in the format "pack-quantized", with scales in `dtype`.

    Raises CheckpointError if `dtype` does not hold the scales exactly."""
    leaves = {"weight_scale": matrix.scale.to(dtype)}
    if not torch.equal(leaves["weight_scale"].to(matrix.scale.dtype), matrix.scale):
        raise CheckpointError(
            f"{dtype} cannot store the scales of this model's quantized weights exactly; save it with "
            "dtype=torch.float32"
        )
    leaves["weight_packed"] = to_words(matrix.codes, scheme.bits)
    leaves["weight_shape"] = torch.tensor(matrix.codes.shape)
    if scheme.zeros:
        zero = matrix.zero_or_middle.T.contiguous()
        leaves["weight_zero_point"] = to_words(zero, scheme.bits).T.contiguous()
    return leaves


def leaf_forms(shape: Sequence[int], scheme: Scheme, dtype: torch.dtype) -> dict[str, Form]:
    """Returns the shapes and dtypes of the tensors that `to_leaves` returns for a matrix of shape `shape`."""
    packing, (outputs, inputs) = PACKINGS[scheme.form], shape
    groups = 1 if scheme.group is None else -(-inputs // scheme.group)
    kinds = {"weight_scale": dtype, "weight_shape": torch.int64}
    shapes = zip(packing.leaves, packing.shapes(outputs, inputs, groups, scheme), strict=True)
    return {
        leaf: Form(shape, kinds.get(leaf, torch.int32))
        for leaf, shape in shapes
        if leaf != "weight_zero_point" or scheme.zeros
    }


def to_words(codes: Tensor, bits: int) -> Tensor:
    """Packs codes uint8 [R, C] into int32 [R, ceil(C bits / 32)]: a word's first code in its lowest bits, padded with
    zeros. The 4-bit codes 1, 2, ..., 8 become the word 0x87654321."""
    per_word = 32 // bits
    rows, columns = codes.shape
    padded = codes.new_zeros(rows, -(-columns // per_word) * per_word)
    padded[:, :columns] = codes
    if bits == 4:
        padded = padded[:, ::2] | padded[:, 1::2] << 4
    return padded.contiguous().view(torch.int32)  # little-endian, as safetensors files are


def from_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """Unpacks the words of `to_words` into uint8 [R, columns]."""
    packed = codes = words.contiguous().view(torch.uint8)
    if bits == 4:
        codes = packed.new_empty(len(packed), 2 * packed.shape[1])
        torch.bitwise_and(packed, 15, out=codes[:, ::2])
        torch.bitwise_right_shift(packed, 4, out=codes[:, 1::2])
    return codes[:, :columns].contiguous()


BLOCK = 32
BLOCKS, SCALES = "_blocks", "_scales"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack_mxfp4(tensors: LazyTensors, path: Path) -> LazyTensors:
    """Returns the tensors of a folder with bf16 matrices instead of mxfp4 blocks and scales, dequantized when read.

    Raises CheckpointError for blocks without scales, scales without blocks, and other shapes or dtypes."""
    names = {name.removesuffix(end) for name in tensors for end in (BLOCKS, SCALES) if name.endswith(end)}
    forms = {name: _mxfp4_form(name, tensors.forms, path) for name in sorted(names)}
    hidden = {f"{name}{end}" for name in forms for end in (BLOCKS, SCALES)}

    def part(name: str, box: tuple[slice, ...]) -> Tensor:
        parts = []
        for end in (BLOCKS, SCALES):
            _, *inner = tensors.forms[f"{name}{end}"].shape
            parts.append(tensors.part(f"{name}{end}", (box[0], *(slice(0, size) for size in inner))))
        return mxfp4_numbers(*parts).transpose(-1, -2)[(slice(None), *box[1:])]

    def whole(name: str) -> Tensor:
        return part(name, tuple(slice(0, size) for size in forms[name].shape))

    return with_values(
        tensors.renamed({name: name for name in tensors if name not in hidden}), forms, whole, part
    )


def mxfp4_numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantizes mxfp4: blocks [..., I / 32, 16] and scales [..., I / 32] -> bf16 [..., I]."""
    values = torch.tensor([*VALUES, *(-value for value in VALUES)])
    # a table of all bytes: byte 0x2A holds codes 0xA and 0x2, so pairs[0x2A] = (values[0xA], values[0x2])
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)
    halves = F.embedding(blocks.int(), pairs).flatten(-2)
    return torch.ldexp(halves, scales[..., None].int() - 127).flatten(-2).to(torch.bfloat16)


def _mxfp4_form(name: str, forms: Mapping[str, Form], path: Path) -> Form:
    blocks, scales = (forms.get(f"{name}{end}") for end in (BLOCKS, SCALES))
    if blocks is None or scales is None:
        raise CheckpointError(f"{path}: {name} needs both {BLOCKS} and {SCALES}, but has only one of them")
    if (
        {blocks.dtype, scales.dtype} != {torch.uint8}
        or len(blocks.shape) != 4
        or blocks.shape[-1] != BLOCK // 2
        or scales.shape != blocks.shape[:-1]
    ):
        raise CheckpointError(
            f"{path}: {name} in mxfp4 must be uint8 {BLOCKS} [experts, outputs, groups, {BLOCK // 2}] and {SCALES} "
            f"without the last axis, got {blocks.dtype} {list(blocks.shape)} and {scales.dtype} {list(scales.shape)}"
        )
    experts, outputs, groups, _ = blocks.shape
    return Form((experts, groups * BLOCK, outputs), torch.bfloat16)
