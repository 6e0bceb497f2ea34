"""Named tensors whose shapes are known before their values are made: read from disk, merged, turned or cast
one at a time, so that nothing needs a second copy of a checkpoint.

    lazy(state).forms                         # {name: Form(shape, dtype)}, of any mapping, without reading a value
    lazy(state).copy_into(name, target)       # target.copy_(state[name]), by the smallest detour
    changed(state, change)                    # {name: change(name, value)}, when asked for
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from headway.errors import CheckpointError, did_you_mean


@dataclass(frozen=True)
class Form:
    """Shape and dtype of a tensor that is not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return prod(self.shape) * self.dtype.itemsize


class LazyTensors(Mapping[str, Tensor]):
    """A mapping that makes a tensor when asked for it, and keeps none.

    Attributes:
        forms: shape and dtype by name, in order.
    """

    forms: Mapping[str, Form]

    def __init__(self, forms: Mapping[str, Form]) -> None:
        self.forms = MappingProxyType(dict(forms))

    @abstractmethod
    def __getitem__(self, name: str) -> Tensor: ...

    @abstractmethod
    def copy_into(self, name: str, target: Tensor) -> None:
        """Copy one value into `target` (of its shape, any dtype). Raises CheckpointError for an unknown name."""

    def part(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """`self[name][box]`, by the smallest detour. Raises CheckpointError for an unknown name."""
        return self[name][box]

    def renamed(self, names: Mapping[str, str]) -> "LazyTensors":
        """The same values under other names: {new name: name here}. Names that are not listed are left out."""
        return Made(
            {new: self.forms[old] for new, old in names.items()},
            lambda name: self[names[name]],
            lambda name, target: self.copy_into(names[name], target),
            lambda name, box: self.part(names[name], box),
        )

    def check_name(self, name: str) -> None:
        """Raise CheckpointError, with the nearest name, for a name that is not here."""
        if name not in self.forms:
            raise CheckpointError(f"there is no tensor {name!r}{did_you_mean(name, self.forms)}")

    def __contains__(self, name: object) -> bool:
        return name in self.forms

    def get(self, name: str, default: Any = None) -> Any:
        """The value of that name; `default` where there is none."""
        return default if name not in self.forms else self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.forms)

    def __len__(self) -> int:
        return len(self.forms)

    @property
    def nbytes(self) -> int:
        """Bytes of all values together."""
        return sum(form.nbytes for form in self.forms.values())


class Made(LazyTensors):
    """Values from `make(name)`, called every time that one is asked for; `copy(name, target)` is `copy_into`, and
    `part(name, box)` is `part`, where these take less than a value."""

    def __init__(
        self,
        forms: Mapping[str, Form],
        make: Callable[[str], Tensor],
        copy: Callable[[str, Tensor], object] | None = None,
        part: Callable[[str, tuple[slice, ...]], Tensor] | None = None,
    ) -> None:
        super().__init__(forms)
        self._make, self._copy, self._part = make, copy, part

    def __getitem__(self, name: str) -> Tensor:
        self.check_name(name)
        value = self._make(name)
        assert (tuple(value.shape), value.dtype) == (self.forms[name].shape, self.forms[name].dtype), name
        return value

    def copy_into(self, name: str, target: Tensor) -> None:
        self.check_name(name)
        if self._copy is None:
            target.copy_(self[name])
        else:
            self._copy(name, target)

    def part(self, name: str, box: tuple[slice, ...]) -> Tensor:
        self.check_name(name)
        return self[name][box] if self._part is None else self._part(name, box)


def compare(
    path: Path,
    forms: Mapping[str, Form],
    expected: Mapping[str, tuple[int, ...]],
    spare: Iterable[str],
    *,
    fault: str,
    says: str,
    more: Sequence[str] = (),
    tip: str = "",
) -> None:
    """Raise CheckpointError that lists, below the `fault`, what is missing of `expected` (names and shapes), unexpected
    (`spare`), of another shape, and `more`; `says` is what gave the shapes, `tip` the end."""
    spare = sorted(spare)
    lines = [f"missing: {name}{_nearest(name, spare)}" for name in expected if name not in forms]
    lines += [f"unexpected: {name}{did_you_mean(name, expected)}" for name in spare]
    lines += [
        f"shape: {name} is {list(forms[name].shape)}, {says} {list(shape)}"
        for name, shape in expected.items()
        if name in forms and forms[name].shape != shape
    ]
    lines += more
    if lines:
        last = [f"... and {len(lines) - 20} more"] if len(lines) > 20 else []
        raise CheckpointError(
            f"{path}: {fault} ({len(lines)} difference{'s' * (len(lines) > 1)}): one of the two is incomplete, or "
            "another model's\n  " + "\n  ".join([*lines[:20], *last]) + tip
        )


def _nearest(name: str, names: Sequence[str]) -> str:
    return did_you_mean(name, names).replace("did you mean", "nearest there:").replace("?", "")


def lazy(state: Mapping[str, Tensor]) -> LazyTensors:
    """Any mapping as `LazyTensors`, without reading a value."""
    if isinstance(state, LazyTensors):
        return state
    return Made({name: Form(tuple(t.shape), t.dtype) for name, t in state.items()}, state.__getitem__)


def changed(
    state: Mapping[str, Tensor],
    change: Callable[[str, Tensor], Tensor],
    shape: Callable[[str, Form], Form] = lambda name, form: form,
) -> LazyTensors:
    """Every value through `change(name, value)`, when asked for.

    `shape(name, form)` is the form that `change` gives it, unless it keeps it.
    """
    forms = {name: shape(name, form) for name, form in lazy(state).forms.items()}
    return Made(forms, lambda name: change(name, state[name]))


def with_values(
    state: Mapping[str, Tensor],
    known: Mapping[str, Form],
    make: Callable[[str], Tensor],
    own_part: Callable[[str, tuple[slice, ...]], Tensor] | None = None,
) -> LazyTensors:
    """The same values, and those of the names in `known`, which are not taken from `state` but made when asked for;
    `own_part` is `part` of these, where that takes less than a value."""
    tensors, parts = lazy(state), own_part or (lambda name, box: make(name)[box])

    def copy(name: str, target: Tensor) -> None:
        if name in known:
            target.copy_(make(name))
        else:
            tensors.copy_into(name, target)

    def part(name: str, box: tuple[slice, ...]) -> Tensor:
        return parts(name, box) if name in known else tensors.part(name, box)

    return Made(
        {**tensors.forms, **known}, lambda name: make(name) if name in known else tensors[name], copy, part
    )


def with_zeros(state: Mapping[str, Tensor], absent: Mapping[str, Form]) -> LazyTensors:
    """The same values, and zeros of the forms `absent`."""
    return with_values(state, absent, lambda name: torch.zeros(absent[name].shape, dtype=absent[name].dtype))


def cast(state: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Every value in `dtype`."""
    return changed(state, lambda name, value: value.to(dtype), lambda name, form: Form(form.shape, dtype))
