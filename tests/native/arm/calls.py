"""Calls of the native kernels as they cross the C interface, with the memory that they read and write, so that a driver
can make them again on another machine (driver.cpp)."""

import ctypes
import gc
from bisect import bisect_right
from collections.abc import Callable, Iterator
from ctypes import c_int32, c_void_p
from dataclasses import dataclass, field
from typing import Any

import torch

from headway.native import interface as c

FUNCTIONS: dict[str, type[ctypes.Structure]] = {
    "headway_linear": c.ProductsStruct,
    "headway_forward": c.CallStruct,
    "headway_backward": c.CallStruct,
    "headway_norm_rows": c.NormStruct,
    "headway_gate_rows": c.GateStruct,
    "headway_rotate_rows": c.RotationStruct,
    "headway_entropy_rows": c.EntropyStruct,
    "headway_convolve_rows": c.ConvolutionStruct,
    "headway_delta_rule": c.DeltaStruct,
    "headway_step": c.OpStruct,
}
OPERATIONS = (
    c.ProductsStruct, c.HeadsStruct, c.CallStruct, c.NormStruct, c.SumsStruct, c.FactorsStruct, c.AddedStruct,
    c.ExpertsStruct, c.TapsStruct, c.DeltaStepStruct,
)  # fmt: skip
"""By their kinds in a step."""
COUNTS = {"matrices": "count", "gate": "count", "up": "count", "down": "count", "scores": "score_count"}
"""How many structures a pointer to some leads to, by its field; others lead to one."""


def _runs(plan: Any) -> int:
    return int(c_int32.from_address(plan.first + 4 * plan.rows * plan.tiles).value)


EXTENTS: dict[tuple[type[ctypes.Structure], str], Callable[[Any], int]] = {
    (c.PlanStruct, "first"): lambda x: 4 * (x.rows * x.tiles + 1),
    (c.PlanStruct, "begin"): lambda x: 4 * _runs(x),
    (c.PlanStruct, "end"): lambda x: 4 * _runs(x),
    (c.PlanStruct, "full"): _runs,
    (c.TokensStruct, "index"): lambda x: 4 * x.rows * x.count,
    (c.TokensStruct, "document"): lambda x: 4 * x.rows * x.count,
    (c.TokensStruct, "order"): lambda x: 4 * x.rows * x.count,
    (c.TokensStruct, "global"): lambda x: x.rows * x.count,
    (c.CallStruct, "program"): lambda x: 16 * x.instructions,
}
"""Bytes of what is no tensor."""
TENSORS = (torch.Tensor, torch.nn.Parameter)
Place = tuple[int, int]


class Unknown(Exception):
    """An address that lies in no tensor."""


@dataclass
class Call:
    """A call: memory as it was before it, by where that began, and after it; and where addresses stand in memory.

    Attributes:
        before, after: bytes of each piece of memory.
        links: (piece, offset) -> (piece, offset) that the address there leads to.
        arguments: addresses as such places, and numbers."""

    function: str
    before: dict[int, bytes] = field(default_factory=dict)
    after: dict[int, bytes] = field(default_factory=dict)
    links: dict[Place, Place] = field(default_factory=dict)
    arguments: list[Place | int] = field(default_factory=list)

    def changed(self) -> Iterator[tuple[int, bytes]]:
        return ((at, data) for at, data in self.after.items() if data != self.before[at])


class Memory:
    """The memory of all tensors that live."""

    def __init__(self) -> None:
        storages = (x.untyped_storage() for x in gc.get_objects() if type(x) in TENSORS and usual(x))
        sizes: dict[int, int] = {}
        for s in storages:
            sizes[s.data_ptr()] = max(s.nbytes(), sizes.get(s.data_ptr(), 0))
        self._begins = sorted(x for x in sizes if x)
        self._sizes = sizes

    def around(self, address: int) -> tuple[int, int]:
        """Where the piece of memory begins in which an address lies, and its size."""
        at = bisect_right(self._begins, address) - 1
        if at < 0 or address > self._begins[at] + self._sizes[self._begins[at]]:
            raise Unknown
        return self._begins[at], self._sizes[self._begins[at]]


def usual(x: torch.Tensor) -> bool:
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu" and x.layout is torch.strided
    )


def taken(function: str, given: tuple[Any, ...]) -> Call:
    """A call that is about to be made. Raises Unknown where it cannot be made again."""
    call, memory = Call(function), Memory()
    root = ctypes.cast(given[0], c_void_p).value
    assert root is not None
    numbers = [int(x.value) for x in given[1:]]
    _walk(call, memory, root, FUNCTIONS[function], numbers[0] if numbers else 1)
    call.arguments = [(root, 0), *numbers]
    return call


def made(call: Call) -> None:
    """Takes what it has written."""
    call.after = {at: ctypes.string_at(at, len(data)) for at, data in call.before.items()}


def _walk(call: Call, memory: Memory, at: int, kind: type[ctypes.Structure], count: int) -> None:
    """Structures side by side, and all that they lead to."""
    if at in call.before:
        return
    call.before[at] = ctypes.string_at(at, ctypes.sizeof(kind) * count)
    for i in range(count):
        _fields(call, memory, at, i * ctypes.sizeof(kind), kind)


def _fields(call: Call, memory: Memory, piece: int, offset: int, kind: type[ctypes.Structure]) -> None:
    own = kind.from_address(piece + offset)
    for name, of, *_ in kind._fields_:
        at = offset + getattr(kind, name).offset
        if issubclass(of, ctypes.Structure):
            _fields(call, memory, piece, at, of)
        elif issubclass(of, ctypes.Array):
            for i in range(of._length_):
                if issubclass(of._type_, ctypes.Structure):
                    _fields(call, memory, piece, at + i * ctypes.sizeof(of._type_), of._type_)
        elif of is c_void_p or hasattr(of, "contents"):
            address = c_void_p.from_address(piece + at).value
            if address:
                _follow(call, memory, (piece, at), address, name, own, None if of is c_void_p else of._type_)


def _follow(
    call: Call,
    memory: Memory,
    place: Place,
    address: int,
    name: str,
    own: Any,
    kind: type[ctypes.Structure] | None,
) -> None:
    """What an address in field `name` of a structure leads to: structures, or a tensor's memory."""
    if isinstance(own, c.OpStruct) and name == "of":
        kind = OPERATIONS[own.kind]
    if kind is not None:
        count = getattr(own, COUNTS[name]) if name in COUNTS else 1
        if count:
            _walk(call, memory, address, kind, count)
            call.links[place] = (address, 0)
        return
    try:
        begin, size = memory.around(address)
    except Unknown:
        if (type(own), name) not in EXTENTS:
            raise Unknown(f"{type(own).__name__}.{name}") from None
        begin, size = address, EXTENTS[type(own), name](own)
    if begin not in call.before:
        call.before[begin] = ctypes.string_at(begin, size)
    call.links[place] = (begin, address - begin)
