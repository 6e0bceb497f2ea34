"""How the target of a conversion stores numbers, and what becomes of a source's codes of 8 or 4 bits."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.folder import Folder
from headway.checkpoints.formats.gguf.model import EXACT, stored_type, without_codes
from headway.checkpoints.quantized.packed import PackedLayer
from headway.choice import Choice
from headway.errors import CheckpointError
from headway.storage.dtypes import check_dtypes, dtype_name
from headway.storage.gguf_blocks import BY_DTYPE, TYPES, BlockType, block_type, blocks, dequantize, quantize
from headway.storage.lazy import Form, LazyTensors, changed, with_values

PACKINGS: Mapping[str, BlockType] = {kind.name.lower(): kind for kind in TYPES if kind.pack is not None}
"""Types that GGUF files hold matrices in, besides dtypes."""


@dataclass(frozen=True)
class Storage:
    """How the target stores the numbers of a folder: as `asked`, in a GGUF file its matrices alone; None is as they
    are."""

    folder: Folder
    gguf: bool
    asked: BlockType | None

    @cached_property
    def coded(self) -> dict[str, PackedLayer]:
        """The layers of 8 or 4 bits by the names of their weights."""
        return {f"{name}.weight": layer for name, layer in self.folder.quantized.items()}

    @cached_property
    def turned(self) -> set[str]:
        """The weights that the target packs in no type, since their columns lie elsewhere there."""
        return without_codes(self.folder.spec) if self.gguf else set()

    @cached_property
    def kept(self) -> dict[str, BlockType]:
        """The weights whose codes the target takes over, and the types that have a place for them."""
        if not self.gguf:
            return {}
        free = [name for name in self.coded if name not in self.turned]
        types = {name: block_type(self.coded[name].read()) for name in free}
        return {name: kind for name, kind in types.items() if kind and self.asked in (None, kind)}

    @property
    def state(self) -> LazyTensors:
        """The folder's weights under our names; those in `kept` are rows of blocks."""
        known, rows = self.folder.tensors.forms, {}
        for name, kind in self.kept.items():
            outputs, inputs = known[name].shape
            rows[name] = Form((outputs, inputs // kind.block * kind.nbytes), torch.uint8)
        return with_values(self.folder.tensors, rows, self._blocks)

    def _blocks(self, name: str) -> Tensor:
        return blocks(self.coded[name].read())

    def kind(self, name: str, form: Form) -> BlockType:
        """How the target holds a tensor; numbers that stand for codes have the dtype of their scales."""
        if name in self.kept:
            return self.kept[name]
        form = self.folder.tensors.forms[name] if name in self.coded else form
        asked = None if name in self.turned else self.asked
        return stored_type(name, form, asked) if self.gguf else self.asked or _plain(form.dtype)

    def value(self, name: str, value: Tensor) -> Tensor:
        """A tensor as the target gives it back."""
        kind = self.kind(name, Form(tuple(value.shape), value.dtype))
        if name in self.kept:
            return dequantize(self._blocks(name), kind)
        if name in self.coded:
            value = value.to(self.folder.tensors.forms[name].dtype)
        return dequantize(quantize(value, kind), kind)

    def rounded(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Weights as the target gives them back."""
        return changed(state, self.value, lambda name, form: Form(form.shape, self.kind(name, form).given_as))

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What becomes of the layers of 8 or 4 bits, and which matrices are not packed as asked."""
        ways = Counter((layer.kept, self._way(name)) for name, layer in self.coded.items())
        rest = [
            name
            for name, form in self.folder.tensors.forms.items()
            if self.gguf
            and self.asked is not None
            and len(form.shape) > 1
            and not name.endswith(EXACT)
            and self.kind(name, form) is not self.asked
        ]
        why = (
            f"not packed, since their rows are no multiples of the blocks of {self.asked and self.asked.name}, or "
            "have another order there"
        )
        return (
            *(Choice(f"{count} layers of {kept}", way) for (kept, way), count in ways.items()),
            *([Choice(", ".join(rest), why)] if rest else []),
        )

    def _way(self, name: str) -> str:
        kind = self.kind(name, self.folder.tensors.forms[name])
        if name in self.kept:
            return f"keep their codes, as {kind.name} with scales in float16"
        if kind.unpack is not None:
            return f"are rounded again, to {kind.name}"
        lost = self.gguf and self.asked is not kind
        why = ": no type has a place for their codes (zeros, rows, or groups)" if lost else ""
        return f"become numbers of {kind.name}{why}"


def storage_of(folder: Folder, to: str, dtype: torch.dtype | str | None) -> Storage:
    """Raises CheckpointError for a dtype that the target does not hold."""
    if to == "gguf":
        known: dict[Any, BlockType] = {**BY_DTYPE, **PACKINGS}
        if dtype is not None and dtype not in known:
            names = [name if isinstance(name, str) else dtype_name(name) for name in known]
            raise CheckpointError(f"a GGUF file does not hold {dtype}; written are {', '.join(names)}")
        return Storage(folder, True, None if dtype is None else known[dtype])
    if isinstance(dtype, str):
        raise CheckpointError(
            f"{dtype!r} is how a GGUF file holds numbers, and the target is a folder: use to='gguf'"
        )
    if dtype is not None:
        check_dtypes({dtype_name(dtype): dtype}, Path("the target"))
    return Storage(folder, False, None if dtype is None else _plain(dtype))


def _plain(dtype: torch.dtype) -> BlockType:
    """Numbers of a dtype in a folder, as a type that packs nothing."""
    return BlockType(dtype_name(dtype), -1, 1, dtype.itemsize, dtype)
