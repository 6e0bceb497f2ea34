"""How the target of a conversion stores numbers, and what becomes of a source's codes of 8 or 4 bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headway.checkpoints.formats.gguf.model import stored_type, stored_value
from headway.checkpoints.formats.sources import Source
from headway.errors import CheckpointError
from headway.storage.dtypes import check_dtypes, dtype_name
from headway.storage.gguf_blocks import BY_DTYPE, TYPES, BlockType, block_type, blocks, dequantize
from headway.storage.lazy import Form, LazyTensors, changed, with_values

Target = Literal["hf", "gguf"]
PACKINGS: Mapping[str, BlockType] = {kind.name.lower(): kind for kind in TYPES if kind.pack is not None}
"""Types that GGUF files hold matrices in, besides dtypes."""


@dataclass(frozen=True)
class Storage:
    """How the target stores the numbers of `source`: a folder all of them in `dtype`, a GGUF file its matrices as
    `packed`; None is as they are."""

    source: Source
    gguf: bool
    dtype: torch.dtype | None
    packed: BlockType | None

    @cached_property
    def kept(self) -> dict[str, BlockType]:
        """The weights whose codes the target takes over, and the types that have a place for them."""
        found = {name: block_type(matrix) for name, matrix in self.source.codes.items()} if self.gguf else {}
        return {name: kind for name, kind in found.items() if kind and self.packed in (None, kind)}

    @property
    def state(self) -> LazyTensors:
        """The source's weights under our names; those in `kept` are rows of blocks."""
        known, rows = self.source.state.forms, {}
        for name, kind in self.kept.items():
            outputs, inputs = known[name].shape
            rows[name] = Form((outputs, inputs // kind.block * kind.nbytes), torch.uint8)
        return with_values(self.source.state, rows, self._blocks)

    def _blocks(self, name: str) -> Tensor:
        return blocks(self.source.codes[name])

    def value(self, name: str, value: Tensor) -> Tensor:
        """A tensor as the target gives it back."""
        if name in self.kept:
            return dequantize(self._blocks(name), self.kept[name])
        if name in self.source.codes:
            value = value.to(self.source.state.forms[name].dtype)
        return stored_value(value, self.packed) if self.gguf else value.to(self.dtype or value.dtype)

    def form(self, name: str, form: Form) -> Form:
        """Of `value`."""
        if name in self.kept:
            return Form(form.shape, torch.float32)
        if name in self.source.codes:
            form = self.source.state.forms[name]
        dtype = stored_type(form, self.packed).given_as if self.gguf else self.dtype or form.dtype
        return Form(form.shape, dtype)

    def rounded(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Weights as the target gives them back."""
        return changed(state, self.value, self.form)

    @property
    def layers(self) -> tuple[str, ...]:
        """What becomes of the layers of 8 or 4 bits, a sentence for each way."""
        said = Counter(f"{self.source.kinds[name]} {self._way(name)}" for name in self.source.codes)
        return tuple(f"{count} layers of {way}" for way, count in said.items())

    def _way(self, name: str) -> str:
        if name in self.kept:
            return f"keep their codes, as {self.kept[name].name} with scales in float16"
        form = self.source.state.forms[name]
        if not self.gguf:
            return f"become numbers of {dtype_name(self.dtype or form.dtype)}"
        kind = stored_type(form, self.packed)
        if kind.unpack is not None:
            return f"are rounded again, to {kind.name}"
        why = "" if self.packed is kind else ": no type has a place for their codes (zeros, rows, or groups)"
        return f"become numbers of {kind.name}{why}"


def storage_of(source: Source, to: Target, dtype: torch.dtype | str | None) -> Storage:
    """Raises CheckpointError for a dtype that the target does not hold."""
    if to == "gguf":
        known: dict[Any, BlockType] = {**BY_DTYPE, **PACKINGS}
        if dtype is not None and dtype not in known:
            names = [name if isinstance(name, str) else dtype_name(name) for name in known]
            raise CheckpointError(f"a GGUF file does not hold {dtype}; written are {', '.join(names)}")
        return Storage(source, True, None, None if dtype is None else known[dtype])
    if isinstance(dtype, str):
        raise CheckpointError(
            f"{dtype!r} is how a GGUF file holds numbers, and the target is a folder: use to='gguf'"
        )
    if dtype is not None:
        check_dtypes({dtype_name(dtype): dtype}, Path("the target"))
    return Storage(source, False, dtype, None)
