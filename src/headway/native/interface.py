"""ctypes structures for csrc/headway.h and its included headers, with fields read from those headers, and error
codes."""

import re
from collections.abc import Callable
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_uint64, c_void_p
from typing import Any, TypeVar

import torch
from torch import Tensor

from headway.native.build import SOURCES

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
INT8, INT4, Q4_K, Q5_K, Q6_K, COMPRESSED, NF4 = range(2, 9)
SOFT_CAP, DISTANCE, SLOPE = range(3)
FEATURES = ("elu+1", "relu", "square", "exp", "softmax", "cosine")
BLOCK = 64
TILE = 96
MOST_WINDOW = 8
DEEPEST = 16
WIDEST = 512
ERRORS = {
    2: "out of memory",
    3: "unsupported type, tile or width",
}
_NUMBERS: dict[str, Any] = {
    "int64_t": c_int64,
    "uint64_t": c_uint64,
    "double": c_double,
    "float": c_float,
}
_FILES = ("headway.h", "headway_rows.h", "headway_step.h")
_HEADER = re.sub("//.*", "", "".join((SOURCES / name).read_text() for name in _FILES))
_SIZES = {name: int(value) for name, value in re.findall(r"(HEADWAY_MOST_\w+) = (\d+)", _HEADER)}
MOST_SCORES, MOST_ROTATED = _SIZES["HEADWAY_MOST_SCORES"], _SIZES["HEADWAY_MOST_ROTATED"]
_BODIES = {name: body for body, name in re.findall(r"typedef struct {(.*?)} (\w+);", _HEADER, re.DOTALL)}


_structs: dict[str, type[Structure]] = {}
S = TypeVar("S", bound=Structure)


def declared(name: str) -> Callable[[type[S]], type[S]]:
    """Returns a class decorator that adds the fields of the header's struct `name`; structs that it contains or points
    to must be declared before it.

    Pointers to declared structs become typed pointers, all other pointers plain addresses."""

    def fill(cls: type[S]) -> type[S]:
        fields: list[tuple[str, Any]] = []
        for kind, names in re.findall(r"(?:const )?(\w+)([^;]+);", _BODIES[name]):
            plain: Any = _structs.get(kind) or _NUMBERS.get(kind)
            for star, field, count in re.findall(r"(\*?) *(\w+)(?:\[(\w+)\])?", names):
                if star:
                    fields.append((field, POINTER(_structs[kind]) if kind in _structs else c_void_p))
                else:
                    fields.append((field, plain * _SIZES[count] if count else plain))
        cls._fields_ = fields
        _structs[name] = cls
        return cls

    return fill


@declared("headway_tensor")
class TensorStruct(Structure):
    """The address of a tensor [B, H, N, D] and its strides in elements; the last dimension is contiguous."""

    @staticmethod
    def of(t: Tensor) -> "TensorStruct":
        batch, head, slot, width = t.stride()
        assert width == 1 or t.shape[3] == 1, (t.shape, t.stride())
        return TensorStruct(t.data_ptr(), batch, head, slot)


@declared("headway_side")
class TokensStruct(Structure):
    """The tokens of the query side or of the key side of a call: index, document, global flag and order."""


@declared("headway_plan")
class PlanStruct(Structure):
    """Runs of key blocks for each tile of queries."""


@declared("headway_score")
class ScoreStruct(Structure):
    """A step on the scaled scores: soft cap, relative bias or slope."""


@declared("headway_call")
class CallStruct(Structure):
    """An attention call, forward or backward."""


@declared("headway_nf4")
class Nf4Struct(Structure):
    """The tables that dequantize NF4 codes."""


@declared("headway_matrix")
class MatrixStruct(Structure):
    """A weight matrix; `step` is in bytes."""


@declared("headway_products")
class ProductsStruct(Structure):
    """Products of rows with weight matrices."""


@declared("headway_heads")
class HeadsStruct(Structure):
    """Query, key and value heads after their projections: norms, rotation, and the write to the KV cache."""


@declared("headway_texts")
class TextsStruct(Structure):
    """The sequence of each row of a step: the page of its state, and whether it begins."""


@declared("headway_sums")
class SumsStruct(Structure):
    """Linear attention of a decoding step."""


@declared("headway_factors")
class FactorsStruct(Structure):
    """Factors on each head's attention output: sigmoid(lse - sink) and sigmoid(gate)."""


@declared("headway_added")
class AddedStruct(Structure):
    """A residual addition x += scale * y, where y is read with its norm, activation and gate."""


@declared("headway_experts")
class ExpertsStruct(Structure):
    """A mixture of experts in a decoding step."""


@declared("headway_taps")
class TapsStruct(Structure):
    """Short convolutions of a decoding step."""


@declared("headway_delta_step")
class DeltaStepStruct(Structure):
    """The gated delta rule of a decoding step."""


@declared("headway_op")
class OpStruct(Structure):
    """One operation of a decoding step."""


@declared("headway_norm")
class NormStruct(Structure):
    """A norm of rows; its gradients if `dy` is given."""


@declared("headway_gate")
class GateStruct(Structure):
    """act(gate) * up of rows; its gradients if `dy` is given."""


@declared("headway_rotation")
class RotationStruct(Structure):
    """Rotary positions applied to heads."""


@declared("headway_entropy")
class EntropyStruct(Structure):
    """Cross entropy of rows of logits, and its gradient."""


@declared("headway_convolution")
class ConvolutionStruct(Structure):
    """Short convolutions; their gradients if `dy` is given."""


@declared("headway_delta")
class DeltaStruct(Structure):
    """The gated delta rule; its gradients if `d_out` or `d_state` is given."""


PRODUCTS, HEADS, ATTENTION, NORM, SUMS, FACTORS, ADDED, EXPERTS, TAPS, DELTA = range(10)
NORMS = {"none": 0, "rms": 1, "layer": 2, "wide rms": 3}
ACTIVATIONS = {"none": 0, "silu": 1, "gelu": 2, "gelu_pytorch_tanh": 3, "relu": 4, "sigmoid": 5}
PAIRINGS = {"halves": 0, "adjacent": 1}
PAIRS = 2
