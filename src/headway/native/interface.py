"""The structures of csrc/headway.h for ctypes, field by field, and what its error codes mean."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p

import torch
from torch import Tensor

ABI = 1
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
INT8, INT4, Q4_K, Q5_K, Q6_K, COMPRESSED, NF4 = range(2, 9)
SOFT_CAP, DISTANCE, SLOPE = range(3)
FEATURES = ("elu+1", "relu", "square", "exp", "softmax", "cosine")
BLOCK = 64
TILE = 96
DEEPEST = 16
WIDEST = 512
MOST_SCORES = 8
ERRORS = {
    1: "it was built for another version",
    2: "no memory left",
    3: "a type, tile or width it does not know",
}


class TensorStruct(Structure):
    """Where a tensor [B, H, N, D] lies; strides in elements, the last dimension is contiguous."""

    _fields_ = (("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("slot", c_int64))

    @staticmethod
    def of(t: Tensor) -> TensorStruct:
        batch, head, slot, width = t.stride()
        assert width == 1 or t.shape[3] == 1, (t.shape, t.stride())
        return TensorStruct(t.data_ptr(), batch, head, slot)


class TokensStruct(Structure):
    _fields_ = (
        ("index", c_void_p),
        ("document", c_void_p),
        ("is_global", c_void_p),
        ("order", c_void_p),
        ("rows", c_int64),
        ("count", c_int64),
    )


class PlanStruct(Structure):
    _fields_ = (
        ("first", c_void_p),
        ("begin", c_void_p),
        ("end", c_void_p),
        ("full", c_void_p),
        ("rows", c_int64),
        ("tiles", c_int64),
        ("tile", c_int64),
        ("alike", c_void_p),
    )


class ScoreStruct(Structure):
    _fields_ = (("kind", c_int64), ("reach", c_int64), ("values", c_void_p), ("gradient", c_void_p))


class CallStruct(Structure):
    _fields_ = (
        ("abi", c_int64),
        ("threads", c_int64),
        ("batch", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("dim_v", c_int64),
        ("type", c_int64),
        ("kv_type", c_int64),
        ("q", TensorStruct),
        ("k", TensorStruct),
        ("v", TensorStruct),
        ("out", TensorStruct),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("scale_batch", c_int64),
        ("scale_head", c_int64),
        ("lse", c_void_p),
        ("scale", c_double),
        ("queries", TokensStruct),
        ("keys", TokensStruct),
        ("plan", PlanStruct),
        ("program", POINTER(c_int32)),
        ("instructions", c_int64),
        ("scores", POINTER(ScoreStruct)),
        ("score_count", c_int64),
        ("dropout", c_double),
        ("seed", c_int64),
        ("first_key", c_int64),
        ("head_ids", c_void_p),
        ("d_out", TensorStruct),
        ("dq", TensorStruct),
        ("dk", TensorStruct),
        ("dv", TensorStruct),
        ("d_lse", c_void_p),
    )


class MatrixStruct(Structure):
    """A matrix of weights; `step` in bytes."""

    _fields_ = (
        ("type", c_int64),
        ("outputs", c_int64),
        ("weights", c_void_p),
        ("step", c_int64),
        ("scales", c_int64),
        ("zeros", c_int64),
        ("factor", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("out_row", c_int64),
        ("add", c_int64),
        ("starts", c_void_p),
        ("table", c_uint64),
        ("nf4", c_void_p),
    )


class Nf4Struct(Structure):
    """What codes of NF4 stand for."""

    _fields_ = (
        ("values", c_void_p),
        ("scales", c_void_p),
        ("map", c_void_p),
        ("largest", c_void_p),
        ("offset", c_float),
        ("first", c_int64),
        ("row", c_int64),
    )


NORMS = {"none": 0, "rms": 1, "layer": 2}
ACTIVATIONS = {"none": 0, "silu": 1, "gelu": 2, "gelu_pytorch_tanh": 3, "relu": 4}


class ProductsStruct(Structure):
    _fields_ = (
        ("abi", c_int64),
        ("threads", c_int64),
        ("rows", c_int64),
        ("inputs", c_int64),
        ("type", c_int64),
        ("x", c_void_p),
        ("x_row", c_int64),
        ("matrices", POINTER(MatrixStruct)),
        ("count", c_int64),
        ("norm", c_int64),
        ("gain", c_void_p),
        ("shift", c_void_p),
        ("eps", c_double),
        ("act", c_int64),
        ("gate", c_void_p),
    )


class HeadsStruct(Structure):
    _fields_ = (
        ("rows", c_int64),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("dim_v", c_int64),
        ("type", c_int64),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("q_row", c_int64),
        ("k_row", c_int64),
        ("v_row", c_int64),
        ("q_gain", c_void_p),
        ("k_gain", c_void_p),
        ("eps", c_double),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rotation_row", c_int64),
        ("partner", c_void_p),
        ("rotated", c_int64),
        ("rotates_values", c_int64),
        ("k_cache", TensorStruct),
        ("v_cache", TensorStruct),
        ("slots", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("scale_head", c_int64),
    )


class SumsStruct(Structure):
    _fields_ = (
        ("rows", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("dim_v", c_int64),
        ("type", c_int64),
        ("feature", c_int64),
        ("key_feature", c_int64),
        ("eps", c_double),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("q_row", c_int64),
        ("k_row", c_int64),
        ("v_row", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rotation_row", c_int64),
        ("partner", c_void_p),
        ("rotated", c_int64),
        ("rotates_both", c_int64),
        ("kv", c_void_p),
        ("z", c_void_p),
        ("pages", c_void_p),
        ("begins", c_void_p),
        ("out", c_void_p),
        ("out_row", c_int64),
    )


PRODUCTS, HEADS, ATTENTION, NORM, SUMS = range(5)


class OpStruct(Structure):
    _fields_ = (
        ("kind", c_int64),
        *((name, c_void_p) for name in ("of", "k", "v", "k_scale", "v_scale")),
    )


class NormStruct(Structure):
    """Backward where `dy` is given."""

    _fields_ = (
        *((name, c_int64) for name in ("abi", "threads", "rows", "width", "type", "kind")),
        ("eps", c_double),
        *((name, c_void_p) for name in ("x", "residual", "gain", "shift", "sum", "y", "mean", "by")),
        *((name, c_void_p) for name in ("dy", "d_sum", "dx", "d_gain", "d_shift")),
    )


class GateStruct(Structure):
    """Backward where `dy` is given."""

    _fields_ = (
        *((name, c_int64) for name in ("abi", "threads", "rows", "width", "type", "act")),
        *((name, c_void_p) for name in ("gate", "up")),
        *((name, c_int64) for name in ("gate_row", "up_row")),
        *((name, c_void_p) for name in ("y", "dy", "d_gate", "d_up")),
        *((name, c_int64) for name in ("d_gate_row", "d_up_row")),
    )


PAIRINGS = {"halves": 0, "adjacent": 1}
PAIRS = 2
MOST_ROTATED = 3


class RotationStruct(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("abi", "threads", "batch", "slots", "dim", "type")),
        ("x", TensorStruct * MOST_ROTATED),
        ("y", TensorStruct * MOST_ROTATED),
        ("heads", c_int64 * MOST_ROTATED),
        ("count", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        *((name, c_int64) for name in ("table_batch", "rotated", "pairing", "back")),
        ("partner", c_void_p),
    )


class EntropyStruct(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("abi", "threads", "rows", "width", "type")),
        *((name, c_void_p) for name in ("logits", "bias", "targets", "losses", "hits")),
        ("gradient", c_int64),
    )
