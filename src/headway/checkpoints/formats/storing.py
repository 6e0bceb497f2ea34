"""How the target of a conversion stores numbers, and what becomes of a source's codes of 8 or 4 bits."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headway.checkpoints.formats.gguf.model import stored_type
from headway.checkpoints.formats.sources import Source
from headway.errors import CheckpointError
from headway.storage.dtypes import check_dtypes, dtype_name
from headway.storage.gguf_blocks import BY_DTYPE, TYPES, BlockType, block_type, blocks, dequantize, quantize
from headway.storage.lazy import Form, LazyTensors, changed, with_values

Target = Literal["hf", "gguf"]
PACKINGS: Mapping[str, BlockType] = {kind.name.lower(): kind for kind in TYPES if kind.pack is not None}
"""Types that GGUF files hold matrices in, besides dtypes."""


@dataclass(frozen=True)
class Storage:
    """How the target stores the numbers of `source`: as `asked`, in a GGUF file its matrices alone; None is as they
    are."""

    source: Source
    gguf: bool
    asked: BlockType | None

    @cached_property
    def kept(self) -> dict[str, BlockType]:
        """The weights whose codes the target takes over, and the types that have a place for them."""
        types = (
            {name: block_type(layer.read()) for name, layer in self.source.coded.items()} if self.gguf else {}
        )
        return {name: kind for name, kind in types.items() if kind and self.asked in (None, kind)}

    @property
    def state(self) -> LazyTensors:
        """The source's weights under our names; those in `kept` are rows of blocks."""
        known, rows = self.source.state.forms, {}
        for name, kind in self.kept.items():
            outputs, inputs = known[name].shape
            rows[name] = Form((outputs, inputs // kind.block * kind.nbytes), torch.uint8)
        return with_values(self.source.state, rows, self._blocks)

    def _blocks(self, name: str) -> Tensor:
        return blocks(self.source.coded[name].read())

    def kind(self, name: str, form: Form) -> BlockType:
        """How the target holds a tensor; numbers that stand for codes have the dtype of their scales."""
        if name in self.kept:
            return self.kept[name]
        form = self.source.state.forms[name] if name in self.source.coded else form
        return stored_type(form, self.asked) if self.gguf else self.asked or _plain(form.dtype)

    def value(self, name: str, value: Tensor) -> Tensor:
        """A tensor as the target gives it back."""
        kind = self.kind(name, Form(tuple(value.shape), value.dtype))
        if name in self.kept:
            return dequantize(self._blocks(name), kind)
        if name in self.source.coded:
            value = value.to(self.source.state.forms[name].dtype)
        return dequantize(quantize(value, kind), kind)

    def rounded(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Weights as the target gives them back."""
        return changed(state, self.value, lambda name, form: Form(form.shape, self.kind(name, form).given_as))

    @property
    def layers(self) -> tuple[str, ...]:
        """What becomes of the layers of 8 or 4 bits, a sentence for each way."""
        said = Counter(f"{layer.kept} {self._way(name)}" for name, layer in self.source.coded.items())
        return tuple(f"{count} layers of {way}" for way, count in said.items())

    def _way(self, name: str) -> str:
        kind = self.kind(name, self.source.state.forms[name])
        if name in self.kept:
            return f"keep their codes, as {kind.name} with scales in float16"
        if kind.unpack is not None:
            return f"are rounded again, to {kind.name}"
        lost = self.gguf and self.asked is not kind
        why = ": no type has a place for their codes (zeros, rows, or groups)" if lost else ""
        return f"become numbers of {kind.name}{why}"


def storage_of(source: Source, to: Target, dtype: torch.dtype | str | None) -> Storage:
    """Raises CheckpointError for a dtype that the target does not hold."""
    if to == "gguf":
        known: dict[Any, BlockType] = {**BY_DTYPE, **PACKINGS}
        if dtype is not None and dtype not in known:
            names = [name if isinstance(name, str) else dtype_name(name) for name in known]
            raise CheckpointError(f"a GGUF file does not hold {dtype}; written are {', '.join(names)}")
        return Storage(source, True, None if dtype is None else known[dtype])
    if isinstance(dtype, str):
        raise CheckpointError(
            f"{dtype!r} is how a GGUF file holds numbers, and the target is a folder: use to='gguf'"
        )
    if dtype is not None:
        check_dtypes({dtype_name(dtype): dtype}, Path("the target"))
    return Storage(source, False, None if dtype is None else _plain(dtype))


def _plain(dtype: torch.dtype) -> BlockType:
    """Numbers of a dtype in a folder, as a type that packs nothing."""
    return BlockType(dtype_name(dtype), -1, 1, dtype.itemsize, dtype)
