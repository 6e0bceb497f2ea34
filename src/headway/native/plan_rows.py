"""Attention plans for rows of one query each, computed by the kernels: `headway_plan_rows` of native/csrc/headway.h."""

import ctypes

from headway.errors import BackendError
from headway.native.loader import library


def plan_rows(
    program: int, instructions: int, index: int, rows: int, runs: tuple[int, int, int, int], room: int
) -> int:
    """Fills the arrays of `runs` (first, begin, end, full; with space for `room` runs of key blocks) for queries whose
    keys are in order, and returns the number of runs. Arrays are passed as addresses.

    Raises BackendError if there are more than `room` runs."""
    kernels = library()
    assert kernels is not None
    size, address, call = ctypes.c_int64, ctypes.c_void_p, kernels.dll.headway_plan_rows
    call.argtypes, call.restype = [address, size, address, size, *[address] * 4, size], size
    count: int = call(program, instructions, index, rows, *runs, room)
    if count < 0:
        raise BackendError(f"a plan of {rows} rows has more than {room} runs of blocks")
    return count
