"""Layers whose matrix is stored in one of the forms of `headway.nn.weights`."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from headway.nn.weights import Plain, Weight

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""The integer dtype in which floats of each size, in bytes, are stored."""


class Keeps(nn.Module):
    """A layer with a matrix `weight`: plain weights are that parameter; other forms are frozen and stored as buffers.

    Attributes:
        kept: the matrix; `keep` replaces it.
    """

    weight: Tensor
    _form: Weight | None = None  # None: plain; else the form, without its tensors
    _dtypes: dict[str, torch.dtype] = {}  # noqa: RUF012  (replaced, and never changed)

    @property
    def kept(self) -> Weight:
        """The matrix, in its current form."""
        if self._form is None:
            return Plain(self.weight)
        buffers = {name: getattr(self, name).view(dtype) for name, dtype in self._dtypes.items()}
        return self._form.with_tensors(buffers)

    def keep(self, weight: Weight) -> None:
        """Replaces the matrix by `weight`, which may have another form."""
        for name in self._dtypes:
            del self._buffers[name]
        if isinstance(weight, Plain):
            trained = self.weight.requires_grad if self.weight is not None else False
            self._form, self._dtypes = None, {}
            self.weight = nn.Parameter(weight.w, requires_grad=trained)
            return
        self.vacate()
        tensors = weight.tensors()
        self._dtypes = {name: t.dtype for name, t in tensors.items()}
        self._form = weight.with_tensors({name: t.new_empty(1) for name, t in tensors.items()})
        for name, t in tensors.items():
            # floats are stored as integers, which a cast of the model leaves unchanged
            bits = t.view(INTEGERS[t.itemsize]) if t.is_floating_point() else t
            self.register_buffer(name, bits, persistent=not weight.exact)

    def vacate(self) -> None:
        """Gives up the plain weights, before another form is stored."""
        self.register_parameter("weight", None)

    @property
    def coded(self) -> bool:
        """Whether its state dict has other tensors instead of `weight`."""
        return self._form is not None and not self._form.exact

    @property
    def matrix(self) -> Tensor:
        """The matrix, dequantized if it has another form than plain."""
        return self.kept.dequantize()

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix in its current form."""
        return self.kept.nbytes

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._form is not None and self._form.exact:
            destination[f"{prefix}weight"] = self.matrix


def kept_as(model: nn.Module) -> str:
    """Describes, for reports, in which forms the weights of a model are stored: "14 layers in int4, else float32"."""
    layers = (m for m in model.modules() if isinstance(m, Keeps) and m._form is not None)
    counts = Counter(layer.kept.name for layer in layers).most_common()
    parts = [f"{count} layer{'s' * (count > 1)} in {name}" for name, count in counts]
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return ", ".join([*parts, f"else {dtype}"]) if parts else dtype
