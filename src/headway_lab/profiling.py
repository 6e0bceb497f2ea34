"""Measuring tools of the laboratory: one thread, random numbers, the fastest of several calls, bytes kept for a
backward pass, and the power law through measured points."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread inside the block. Models of the laboratory's size gain nothing from a second thread,
    and with one, their sums do not depend on the machine's number of cores."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)


def in_turn(
    calls: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Returns the seconds of each call, `repeats` times. The calls take turns, so that all run under the same load."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            began = clock()
            call()
            seconds[name].append(clock() - began)
    return seconds


def fastest(
    call: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Returns the seconds of the fastest of `repeats` calls."""
    return min(in_turn({"": call}, repeats, clock)[""])


def saved_bytes(
    forward: Callable[[], Tensor], model: nn.Module, *, integers: bool = False
) -> tuple[Tensor, int]:
    """Returns the result of `forward` and the bytes of the distinct tensors that autograd keeps for its backward,
    without the parameters of `model`; integer tensors (ids, targets) count only with `integers`."""
    sizes: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        if integers or t.dtype.is_floating_point or t.dtype == torch.bool:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = forward()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return out, sum(size for address, size in sizes.items() if address not in parameters)


def flops(call: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Returns the floating-point operations of the matrix products and convolutions that a call runs, and its
    result."""
    with FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Returns samples of N(0, 1) in float64; equal seeds give equal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def doublings(first: int, last: int) -> tuple[int, ...]:
    """Returns first, 2 first, 4 first, ... up to last."""
    return tuple(first * 2**i for i in range((last // first).bit_length()))


class Exponent(NamedTuple):
    """The exponent p of n^p and its standard error, which is None for two points: a line always passes through two."""

    p: float
    error: float | None

    def __str__(self) -> str:
        return f"n^{self.p:.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")


def exponent(x: Sequence[float], y: Sequence[float]) -> Exponent:
    """Returns the least-squares slope of log y over log x, and its standard error sqrt(sum of squared residuals / (m -
    2) / sum (log x - mean log x)^2) for m points."""
    a, b = [math.log(v) for v in x], [math.log(v) for v in y]
    slope, intercept = statistics.linear_regression(a, b)
    if len(a) == 2:
        return Exponent(slope, None)
    squared_residuals = sum((v - intercept - slope * u) ** 2 for u, v in zip(a, b, strict=True))
    squared_deviations = sum((u - statistics.mean(a)) ** 2 for u in a)
    return Exponent(slope, math.sqrt(squared_residuals / (len(a) - 2) / squared_deviations))


def power(x: Sequence[float], y: Sequence[float]) -> float:
    """Returns the p of the best-fitting power law y = c x^p: the slope of log y over log x."""
    return exponent(x, y).p
