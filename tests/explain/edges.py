"""Where a verdict turns: each number in a judge's arguments is changed alone until a claim is lost or won."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

from torch import Tensor

from headway_lab.explain.report import Report
from headway_lab.explain.runs import Run

Path = tuple[Any, ...]
DECADES = [10.0**p for p in range(-16, 10, 4)]
BESIDE = (0.3, 0.7, 0.95, 1.05, 1.3, 3.0)
Verdict = tuple[bool | None, ...] | None


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yields the paths of the numbers in a judge's arguments; of longer lists the first, a middle and the last one, of
    tensors the first and the last one."""
    if isinstance(value, Run):
        yield (*path, "loss")
    elif isinstance(value, (bool, int, float)):
        yield path
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, Tensor):
        yield from ((*path, 0), (*path, -1))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        return
    elif isinstance(value, (list, tuple)):
        for n in sorted({0, len(value) // 2, len(value) - 1}) if value else ():
            yield from leaves(value[n], (*path, n))
    elif is_dataclass(value) and type(value).__name__ == "Gap":
        for field in fields(value):
            yield (*path, field.name)


def at(value: Any, path: Path) -> Any:
    for key in path:
        if isinstance(value, Tensor):
            return value.flatten()[key].item()
        value = getattr(value, key) if is_dataclass(value) else value[key]
    return value


def put(value: Any, path: Path, new: Any) -> Any:
    """Returns a copy with another number at one path."""
    if not path:
        return new
    key, *rest = path
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{key: put(getattr(value, key), tuple(rest), new)})
    if isinstance(value, Tensor):
        changed = value.clone()
        changed.view(-1)[key] = new
        return changed
    item = put(value[key], tuple(rest), new)
    if isinstance(value, Mapping):
        return {**value, key: item}
    return type(value)((*value[:key], item, *value[key + 1 :]))


def listing(judge: Callable[..., Report], arguments: tuple[Any, ...]) -> Iterator[str]:
    """Yields a line for each number and each claim that turns with it."""
    yield "turns"
    for path in leaves(list(arguments)):
        value = at(arguments, path)

        @cache
        def verdict(x: Any, path: Path = path) -> Verdict:
            try:
                return tuple(judge(*put(arguments, path, x)).claims.values())
            except (ArithmeticError, ValueError, LookupError, AssertionError):
                return None

        for n in range(len(judge(*arguments).claims)):
            if turns := [*edges(value, n, verdict)]:
                yield f"  {' '.join(map(str, path))}: claim {n}: {'; '.join(turns)}"


def edges(value: Any, n: int, verdict: Callable[[Any], Verdict]) -> Iterator[str]:
    def claim(x: Any) -> str:
        claims = verdict(x)
        return "error" if claims is None else str(claims[n]) if n < len(claims) else "gone"

    if isinstance(value, bool):
        if claim(value) != claim(not value):
            yield f"{not value} {claim(not value)}"
        return
    if isinstance(value, int):
        points: list[Any] = sorted({0, 1, value - 1, value, value + 1, 2 * value, 4 * value})
        bisect = False
    else:
        near = [abs(value) * b for b in BESIDE] if value and math.isfinite(value) else []
        sizes = sorted({*DECADES, *near, abs(value)})
        points, bisect = [*(-s for s in reversed(sizes)), 0.0, *sizes], True
    outcomes = [(x, outcome) for x in points if (outcome := claim(x)) != "error"]
    for (a, left), (b, right) in pairwise(outcomes):
        if left != right:
            yield f"{left} {border(a, b, left, claim) if bisect else f'{a} {b}'} {right}"


def border(a: float, b: float, left: str, claim: Callable[[Any], str]) -> str:
    """Returns the number between a and b, of equal sign, where a claim turns, within half a percent."""
    if a * b <= 0:
        return "0.0"
    while abs(a - b) > 0.005 * abs(a):
        middle = math.copysign(math.sqrt(a * b), a)
        a, b = (middle, b) if claim(middle) == left else (a, middle)
    return f"{(a + b) / 2:.2e}"
