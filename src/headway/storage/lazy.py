"""Lazy named tensors: shapes and dtypes are known, values are read, converted or merged one at a time on access, so
that nothing needs a second copy of a checkpoint.

    lazy(state).forms                         # {name: Form(shape, dtype)}, of any mapping, without reading a value
    lazy(state).copy_into(name, target)       # target.copy_(state[name]), with as little memory as possible
    changed(state, change)                    # {name: change(name, value)}, computed on access
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
    """Shape and dtype of a tensor whose value is not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return prod(self.shape) * self.dtype.itemsize


class LazyTensors(Mapping[str, Tensor]):
    """A mapping that makes a tensor on access and keeps none.

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
        """Copies one value into `target` (of its shape, any dtype). Raises CheckpointError for an unknown name."""

    def part(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Returns `self[name][box]`, reading no more than needed. Raises CheckpointError for an unknown name."""
        return self[name][box]

    def renamed(self, names: Mapping[str, str]) -> "LazyTensors":
        """Returns the same values under other names, {new name: old name}, without the names that are not listed."""
        return Made(
            {new: self.forms[old] for new, old in names.items()},
            lambda name: self[names[name]],
            lambda name, target: self.copy_into(names[name], target),
            lambda name, box: self.part(names[name], box),
        )

    def check_name(self, name: str) -> None:
        """Raises CheckpointError, with the nearest known name, for an unknown name."""
        if name not in self.forms:
            raise CheckpointError(f"there is no tensor {name!r}{did_you_mean(name, self.forms)}")

    def __contains__(self, name: object) -> bool:
        return name in self.forms

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of a name, or `default` if it is unknown."""
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
    """Values made by `make(name)` on every access; `copy(name, target)` and `part(name, box)` implement `copy_into` and
    `part` if these need less than a whole value."""

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
    """Raises CheckpointError if the tensors differ from the `expected` ones (names and shapes).

    Below `fault` it lists missing names, unexpected ones (`spare`), other shapes, and `more`; `says` names the source
    of the expected shapes, and `tip` ends the message."""
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
        ellipsis = [f"... and {len(lines) - 20} more"] if len(lines) > 20 else []
        raise CheckpointError(
            f"{path}: {fault} ({len(lines)} difference{'s' * (len(lines) > 1)}): one of the two is incomplete, or "
            "another model's\n  " + "\n  ".join([*lines[:20], *ellipsis]) + tip
        )


def _nearest(name: str, names: Sequence[str]) -> str:
    return did_you_mean(name, names).replace("did you mean", "nearest there:").replace("?", "")


def lazy(state: Mapping[str, Tensor]) -> LazyTensors:
    """Returns any mapping as `LazyTensors`, without reading a value of a lazy one."""
    if isinstance(state, LazyTensors):
        return state
    return Made({name: Form(tuple(t.shape), t.dtype) for name, t in state.items()}, state.__getitem__)


def changed(
    state: Mapping[str, Tensor],
    change: Callable[[str, Tensor], Tensor],
    shape: Callable[[str, Form], Form] = lambda name, form: form,
) -> LazyTensors:
    """Returns every value mapped by `change(name, value)`, on access.

    `shape(name, form)` is the form of the changed value; unless given, the form stays.
    """
    forms = {name: shape(name, form) for name, form in lazy(state).forms.items()}
    return Made(forms, lambda name: change(name, state[name]))


def with_values(
    state: Mapping[str, Tensor],
    known: Mapping[str, Form],
    make: Callable[[str], Tensor],
    own_part: Callable[[str, tuple[slice, ...]], Tensor] | None = None,
) -> LazyTensors:
    """Returns the same values, with those of the names in `known` replaced or added by `make(name)`, on access.

    `own_part` is `part` for these, if it needs less than a whole value."""
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
    """Returns the same values, and zeros of the forms in `absent`."""
    return with_values(state, absent, lambda name: torch.zeros(absent[name].shape, dtype=absent[name].dtype))


def cast(state: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Returns every value in `dtype`."""
    return changed(state, lambda name, value: value.to(dtype), lambda name, form: Form(form.shape, dtype))
