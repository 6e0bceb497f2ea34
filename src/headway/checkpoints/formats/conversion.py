"""Converts a checkpoint and verifies that it is the same function: the target is written only if the check passes. If
the target rounds numbers to another dtype, the comparison is with the source rounded in the same way. `Storage` says
how the target stores numbers, and what becomes of 8-bit or 4-bit codes of the source.

The reference logits come from the source's own forward pass (for Meta's formats a plain one on their tensor names,
independent of `Decoder`), the converted logits from loading the folder that was just written, before it is renamed.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headway.checkpoints.folder import Folder, Format, load_folder
from headway.checkpoints.formats.gguf.folded import folded, times
from headway.checkpoints.formats.gguf.model import EXACT, stored_type, without_codes
from headway.checkpoints.formats.meta import MetaModel
from headway.checkpoints.heads import change_pairing, repeat_kv_heads
from headway.checkpoints.hf.layouts import layouts_for
from headway.checkpoints.quantized.packed import PackedLayer
from headway.checkpoints.restore import fill, load_model
from headway.checkpoints.rewriting import (
    Change,
    Difference,
    Measured,
    Rewritten,
    Target,
    probe,
    rewrite,
    target_of,
)
from headway.checkpoints.saving import SHARD_BYTES, check_target
from headway.choice import Choice
from headway.errors import CheckpointError
from headway.positions import Pairing, rotations
from headway.storage.dtypes import check_dtypes, dtype_name
from headway.storage.gguf_blocks import BY_DTYPE, TYPES, BlockType, block_type, blocks, dequantize, quantize
from headway.storage.lazy import Form, LazyTensors, cast, changed, with_values
from headway.text import Tokenizer

PACKINGS: Mapping[str, BlockType] = {kind.name.lower(): kind for kind in TYPES if kind.pack is not None}
"""Block types for the matrices of GGUF files, besides dtypes, by their lowercase names."""


@dataclass(frozen=True)
class Storage:
    """How the target stores the numbers of a folder: in the type `asked` (in a GGUF file only its matrices), or
    unchanged if that is None."""

    folder: Folder
    gguf: bool
    asked: BlockType | None

    @cached_property
    def coded(self) -> dict[str, PackedLayer]:
        """The 8-bit or 4-bit layers, by the names of their weights."""
        return {f"{name}.weight": layer for name, layer in self.folder.quantized.items()}

    @cached_property
    def turned(self) -> set[str]:
        """Names of the weights that the target never packs, since it stores their columns in another order."""
        return without_codes(self.folder.spec) if self.gguf else set()

    @cached_property
    def factors(self) -> dict[str, Tensor]:
        """Factors of rows that are folded into the target's weights and not into the source's."""
        return folded(self.folder.spec)[1] if self.gguf else {}

    @cached_property
    def kept(self) -> dict[str, BlockType]:
        """The weights whose codes the target keeps, and the block types that hold them."""
        if not self.gguf:
            return {}
        free = [name for name in self.coded if name not in self.turned and name not in self.factors]
        types = {name: block_type(self.coded[name].read()) for name in free}
        return {name: kind for name, kind in types.items() if kind and self.asked in (None, kind)}

    @property
    def state(self) -> LazyTensors:
        """The folder's weights under our names; those in `kept` are rows of blocks."""
        forms, rows = self.folder.tensors.forms, {}
        for name, kind in self.kept.items():
            outputs, inputs = forms[name].shape
            rows[name] = Form((outputs, inputs // kind.block * kind.nbytes), torch.uint8)
        return with_values(self.folder.tensors, rows, self._blocks)

    def _blocks(self, name: str) -> Tensor:
        return blocks(self.coded[name].read())

    def kind(self, name: str, form: Form) -> BlockType:
        """Returns the type to store a tensor in. Without `asked`, dequantized numbers get the dtype of their scales."""
        if name in self.kept:
            return self.kept[name]
        form = self.folder.tensors.forms[name] if name in self.coded else form
        requested = None if name in self.turned else self.asked
        return stored_type(name, form, requested) if self.gguf else self.asked or _plain(form.dtype)

    def value(self, name: str, value: Tensor) -> Tensor:
        """Returns a tensor after a round trip through the target's type."""
        kind = self.kind(name, Form(tuple(value.shape), value.dtype))
        if name in self.kept:
            return dequantize(self._blocks(name), kind)
        if name in self.coded:
            value = value.to(self.folder.tensors.forms[name].dtype)
        value = dequantize(quantize(times(self.factors, name, value), kind), kind)
        return value.float() / self.factors[name] if name in self.factors else value

    def rounded(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns weights after a round trip through the target's types."""

        def form(name: str, source: Form) -> Form:
            dtype = torch.float32 if name in self.factors else self.kind(name, source).given_as
            return Form(source.shape, dtype)

        return changed(state, self.value, form)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Report of what becomes of 8-bit and 4-bit layers, and of which matrices are not packed as requested."""
        ways = Counter((layer.kept, self._way(name)) for name, layer in self.coded.items())
        not_packed = [
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
            *([Choice(", ".join(not_packed), why)] if not_packed else []),
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
    """Returns the storage of a target. Raises CheckpointError for a dtype that the target does not hold."""
    if to == "gguf":
        types: dict[Any, BlockType] = {**BY_DTYPE, **PACKINGS}
        if dtype is not None and dtype not in types:
            names = [name if isinstance(name, str) else dtype_name(name) for name in types]
            raise CheckpointError(
                f"dtype {dtype} is not a type of GGUF files; choose one of {', '.join(names)}"
            )
        return Storage(folder, True, None if dtype is None else types[dtype])
    if isinstance(dtype, str):
        raise CheckpointError(
            f"dtype {dtype!r} is a type of GGUF files, and the target is a folder; use to='gguf' (--to gguf)"
        )
    if dtype is not None:
        check_dtypes({dtype_name(dtype): dtype}, Path("the target"))
    return Storage(folder, False, None if dtype is None else _plain(dtype))


def _plain(dtype: torch.dtype) -> BlockType:
    """Returns a dtype of a folder as a block type that packs nothing."""
    return BlockType(dtype_name(dtype), -1, 1, dtype.itemsize, dtype)


PROBE = 64
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-12}
"""The largest allowed difference, relative to the largest logit."""
Forward = Callable[[Mapping[str, Tensor], torch.dtype], Tensor]


@torch.no_grad()
def convert(
    source: str | Path,
    target: str | Path,
    *,
    frm: Format | Literal["auto"] = "auto",
    to: Target | None = None,
    to_pairing: Pairing | None = None,
    kv_heads: int | None = None,
    dtype: torch.dtype | str | None = None,
    tokenizer: Tokenizer | None = None,
    allow_pickle: bool = False,
    overwrite: bool = False,
    shard_bytes: int | None = None,
) -> Rewritten:
    """Writes `source` as a folder or a GGUF file, and compares their logits before it is renamed to `target`.

    Args:
        frm: the format of the source; "auto" detects it from the file.
        to: "hf" or "gguf"; None is "gguf" if the target's name ends in .gguf, else "hf".
        to_pairing: rotary pairing of a folder: "halves", "adjacent" or explicit pairs; None is that of its family. A
            GGUF file always has the pairing of its architecture.
        kv_heads: key and value heads of the result, by exact repetition (`repeat_kv_heads`); None keeps them.
        dtype: stored dtype of the result, for a GGUF file that of its matrices: a torch dtype, or "q8_0", "q4_k", ...
            None keeps the source's.
        tokenizer: is saved with the result; None copies the source's tokenizer.
        allow_pickle: whether pickled files may be read.
        overwrite: replaces `target` if it exists.
        shard_bytes: maximal number of bytes in one file of a folder's weights.

    The largest allowed difference is 1e-5 of the largest logit in float32 or, if another order of summation exceeds
    that, 1e-12 of it in float64; in bfloat16 it is twice the error that bfloat16 causes in the source (its distance
    from the source in float32).

    Values are read, changed and written one at a time. Raises CheckpointError, leaving `target` unchanged, if the
    logits differ, if `target` exists (unless `overwrite`), or if the source cannot be read.
    """
    to = to or target_of(target)
    check_target(target, overwrite)
    if to == "gguf" and (to_pairing is not None or shard_bytes is not None):
        raise CheckpointError(
            "to_pairing and shard_bytes do not apply to a GGUF file, which is one file in the pairing of its "
            "architecture; remove them"
        )
    folder = load_folder(source, frm=frm, allow_pickle=allow_pickle)
    storage, spec = storage_of(folder, to, dtype), folder.spec
    state: Mapping[str, Tensor] = storage.state
    if kv_heads is not None:
        state, spec = repeat_kv_heads(state, spec, kv_heads)
    if rotations(spec.positions):
        if to == "hf":
            state, spec = change_pairing(state, spec, to_pairing or layouts_for(spec.family)[0].pairing)
    elif to_pairing not in (None, "halves"):
        raise CheckpointError(
            f"to_pairing {to_pairing!r}: {source} has no rotary positions; remove to_pairing"
        )
    length = min(PROBE, spec.trained_context, spec.context_limit or PROBE)
    ids = probe(spec, None, length)
    weights, forward = _reference(storage, ids)
    rounded = storage.rounded(weights)
    exact = forward(rounded, torch.float32)

    def compare(written: Path, dtype: torch.dtype) -> Difference:
        wide = torch.promote_types(dtype, torch.float32)
        ours = load_model(written, dtype=dtype, dequantize=True)(ids[None])[0].to(wide)
        theirs = exact if dtype == torch.float32 else forward(rounded, dtype).to(wide)
        largest = float(exact.abs().max())
        difference, bound = _largest(ours - theirs), BOUNDS.get(dtype, 0.0) * largest
        if dtype not in BOUNDS:
            difference, bound = _largest(ours - exact), 2 * _largest(theirs - exact)
        return Difference(
            tokens=length, probed=length, dtype=dtype_name(dtype), difference=difference, largest=largest, bound=bound
        )  # fmt: skip

    def measure(written: Path) -> Measured:
        checks = [compare(written, dtype) for dtype in (torch.float32, torch.bfloat16)]
        if not checks[0].passed:
            checks[0] = compare(written, torch.float64)
        for check in checks:
            if not check.passed:
                raise CheckpointError(
                    f"{source} and its conversion differ: logits by up to {check.difference:.3g} in {check.dtype} "
                    f"(allowed {check.bound:.3g}, largest logit {check.largest:.3g}); {target} was not written"
                )
        return Measured(tuple(checks), rounding=rounding or None)

    rounding = _largest(forward(weights, torch.float32) - exact)
    change = Change(
        spec, state if to == "gguf" else storage.rounded(state), choices=storage.choices, tokenizer=tokenizer,
        matrices=storage.asked, packed=storage.kept,
    )  # fmt: skip
    return rewrite(
        folder, target, change, measure, to=to, context=length, overwrite=overwrite,
        shard_bytes=SHARD_BYTES if shard_bytes is None else shard_bytes,
    )  # fmt: skip


def _reference(storage: Storage, ids: Tensor) -> tuple[Mapping[str, Tensor], Forward]:
    """Returns the weights of a folder, with 8-bit and 4-bit codes dequantized to float32, and the forward pass of its
    format: from weights and a dtype to the logits [T, V] of the sequence `ids`."""
    folder = storage.folder
    if folder.format in ("llama2c", "meta"):
        model = MetaModel(folder.spec, folder.stored, folder.path)
        return folder.stored, lambda weights, dtype: model.logits(cast(weights, dtype), ids)
    exact = {name: Form(layer.form.shape, torch.float32) for name, layer in storage.coded.items()}
    weights = with_values(folder.tensors, exact, lambda name: storage.coded[name].read().dequantize())
    return weights, lambda weights, dtype: fill(folder.spec, weights, dtype=dtype)(ids[None])[0]


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())
