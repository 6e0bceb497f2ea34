"""The structures of csrc/headway.h and the headers that it includes for ctypes, read from them, and what error codes
mean."""

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
    2: "no memory left",
    3: "a type, tile or width it does not know",
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
    """Gives a class the fields of a structure of the header; structures that it holds or points to come before it.

    Pointers to structures are pointers, others addresses."""

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
    """Tokens of the queries or of the keys."""


@declared("headway_plan")
class PlanStruct(Structure):
    """Runs of blocks of keys."""


@declared("headway_score")
class ScoreStruct(Structure):
    """A step on scores."""


@declared("headway_call")
class CallStruct(Structure):
    """Attention."""


@declared("headway_nf4")
class Nf4Struct(Structure):
    """The numbers that codes of NF4 stand for."""


@declared("headway_matrix")
class MatrixStruct(Structure):
    """A matrix of weights; `step` in bytes."""


@declared("headway_products")
class ProductsStruct(Structure):
    """Rows times matrices."""


@declared("headway_heads")
class HeadsStruct(Structure):
    """Heads of rows behind their projections."""


@declared("headway_texts")
class TextsStruct(Structure):
    """The texts whose rows are read."""


@declared("headway_sums")
class SumsStruct(Structure):
    """Linear attention."""


@declared("headway_factors")
class FactorsStruct(Structure):
    """Heads of rows behind attention, times a number each."""


@declared("headway_added")
class AddedStruct(Structure):
    """Rows that are added to others, normed and times a number."""


@declared("headway_experts")
class ExpertsStruct(Structure):
    """A mixture of experts."""


@declared("headway_taps")
class TapsStruct(Structure):
    """Short convolutions of a step."""


@declared("headway_delta_step")
class DeltaStepStruct(Structure):
    """The gated delta rule of a step."""


@declared("headway_op")
class OpStruct(Structure):
    """An operation of a step."""


@declared("headway_norm")
class NormStruct(Structure):
    """Backward where `dy` is given."""


@declared("headway_gate")
class GateStruct(Structure):
    """Backward where `dy` is given."""


@declared("headway_rotation")
class RotationStruct(Structure):
    """Rotary positions."""


@declared("headway_entropy")
class EntropyStruct(Structure):
    """Cross entropy."""


@declared("headway_convolution")
class ConvolutionStruct(Structure):
    """Short convolutions; backward where `dy` is given."""


@declared("headway_delta")
class DeltaStruct(Structure):
    """The gated delta rule; backward where `d_out` or `d_state` is given."""


PRODUCTS, HEADS, ATTENTION, NORM, SUMS, FACTORS, ADDED, EXPERTS, TAPS, DELTA = range(10)
NORMS = {"none": 0, "rms": 1, "layer": 2, "wide rms": 3}
ACTIVATIONS = {"none": 0, "silu": 1, "gelu": 2, "gelu_pytorch_tanh": 3, "relu": 4, "sigmoid": 5}
PAIRINGS = {"halves": 0, "adjacent": 1}
PAIRS = 2
