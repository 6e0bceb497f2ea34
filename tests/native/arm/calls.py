"""Calls of the native kernels as they cross the C interface, with the memory that they read and write, so that
driver.cpp can repeat them on another machine."""

import ctypes
import gc
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int32, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headway.native import interface as c
from headway.native import loader

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
"""The structures of a step's operations, by their kind."""
COUNTS = {"matrices": "count", "gate": "count", "up": "count", "down": "count", "scores": "score_count"}
"""The field that counts the structures behind a pointer, by the pointer's field; other pointers lead to one."""


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
"""Number of bytes behind pointers to memory that is no tensor, by structure and field."""
TENSORS = (torch.Tensor, torch.nn.Parameter)
Place = tuple[int, int]


class Unknown(Exception):
    """An address that lies in no tensor."""


@dataclass
class Call:
    """A recorded call: the memory that it reaches, before and after it, and the addresses inside this memory.

    Attributes:
        before, after: bytes of each piece of memory, by the address where the piece begins.
        links: (piece, offset) of an address -> (piece, offset) that it points to.
        arguments: numbers, and addresses as (piece, offset)."""

    function: str
    before: dict[int, bytes] = field(default_factory=dict)
    after: dict[int, bytes] = field(default_factory=dict)
    links: dict[Place, Place] = field(default_factory=dict)
    arguments: list[Place | int] = field(default_factory=list)

    def changed(self) -> Iterator[tuple[int, bytes]]:
        return ((address, data) for address, data in self.after.items() if data != self.before[address])


class Memory:
    """The memory of all live tensors."""

    def __init__(self) -> None:
        storages = (x.untyped_storage() for x in gc.get_objects() if type(x) in TENSORS and usual(x))
        sizes: dict[int, int] = {}
        for s in storages:
            sizes[s.data_ptr()] = max(s.nbytes(), sizes.get(s.data_ptr(), 0))
        self._begins = sorted(x for x in sizes if x)
        self._sizes = sizes

    def around(self, address: int) -> tuple[int, int]:
        """Returns begin and size of the piece of memory that contains an address. Raises Unknown if there is none."""
        index = bisect_right(self._begins, address) - 1
        if index < 0 or address > self._begins[index] + self._sizes[self._begins[index]]:
            raise Unknown
        return self._begins[index], self._sizes[self._begins[index]]


def usual(x: torch.Tensor) -> bool:
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu" and x.layout is torch.strided
    )


def taken(function: str, arguments: tuple[Any, ...]) -> Call:
    """Records a call that is about to be made. Raises Unknown if it cannot be repeated."""
    call, memory = Call(function), Memory()
    root = ctypes.cast(arguments[0], c_void_p).value
    assert root is not None
    numbers = [int(x.value) for x in arguments[1:]]
    _walk(call, memory, root, FUNCTIONS[function], numbers[0] if numbers else 1)
    call.arguments = [(root, 0), *numbers]
    return call


class Taken:
    """A stand-in for the library that records calls and makes none."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getattr__(self, function: str) -> Callable[..., int]:
        def take(*arguments: Any) -> int:
            self.calls.append(taken(function, arguments))
            return 0

        return take


@contextmanager
def running(dll: Any) -> Iterator[None]:
    """While open, kernels are called in `dll`, a stand-in for the library."""
    found = loader.Found(loader.Library("none", Path(), dll))
    search, loader.search = loader.search, lambda: found  # type: ignore[assignment]
    try:
        yield
    finally:
        loader.search = search


def made(call: Call) -> None:
    """Records what the call has written."""
    call.after = {address: ctypes.string_at(address, len(data)) for address, data in call.before.items()}


def _walk(call: Call, memory: Memory, address: int, kind: type[ctypes.Structure], count: int) -> None:
    """Records adjacent structures, and everything that they point to."""
    if address in call.before:
        return
    call.before[address] = ctypes.string_at(address, ctypes.sizeof(kind) * count)
    for i in range(count):
        _fields(call, memory, address, i * ctypes.sizeof(kind), kind)


def _fields(call: Call, memory: Memory, piece: int, offset: int, kind: type[ctypes.Structure]) -> None:
    structure = kind.from_address(piece + offset)
    for name, field_type, *_ in kind._fields_:
        field_offset = offset + getattr(kind, name).offset
        if issubclass(field_type, ctypes.Structure):
            _fields(call, memory, piece, field_offset, field_type)
        elif issubclass(field_type, ctypes.Array):
            for i in range(field_type._length_):
                if issubclass(field_type._type_, ctypes.Structure):
                    _fields(
                        call,
                        memory,
                        piece,
                        field_offset + i * ctypes.sizeof(field_type._type_),
                        field_type._type_,
                    )
        elif field_type is c_void_p or hasattr(field_type, "contents"):
            address = c_void_p.from_address(piece + field_offset).value
            if address:
                _follow(
                    call,
                    memory,
                    (piece, field_offset),
                    address,
                    name,
                    structure,
                    None if field_type is c_void_p else field_type._type_,
                )


def _follow(
    call: Call,
    memory: Memory,
    place: Place,
    address: int,
    name: str,
    structure: Any,
    kind: type[ctypes.Structure] | None,
) -> None:
    """Records what the address in field `name` of a structure points to: structures, or a tensor's memory."""
    if isinstance(structure, c.OpStruct) and name == "of":
        kind = OPERATIONS[structure.kind]
    if kind is not None:
        count = getattr(structure, COUNTS[name]) if name in COUNTS else 1
        if count:
            _walk(call, memory, address, kind, count)
            call.links[place] = (address, 0)
        return
    try:
        begin, size = memory.around(address)
    except Unknown:
        if (type(structure), name) not in EXTENTS:
            raise Unknown(f"{type(structure).__name__}.{name}") from None
        begin, size = address, EXTENTS[type(structure), name](structure)
    if begin not in call.before:
        call.before[begin] = ctypes.string_at(begin, size)
    call.links[place] = (begin, address - begin)
