"""Meta's model-parallel files, consolidated.00.pth, consolidated.01.pth, ..., joined lazily into one model.

fairscale's layers split a matrix [out, in] of torch (`fairscale.nn.model_parallel.layers`):

    ColumnParallelLinear     rows, axis 0         wq, wk, wv, w1, w3, output
    RowParallelLinear        columns, axis 1      wo, w2
    ParallelEmbedding        columns, axis 1      tok_embeddings of LLaMA 1 and 2
    VocabParallelEmbedding   rows, axis 0         tok_embeddings of LLaMA 3
    norms, rope.freqs        whole in every part

With more parts than kv heads, every kv head is in several consecutive parts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.errors import CheckpointError
from headway.storage.safetensors import Entry
from headway.storage.shards import Box, Whole
from headway.storage.tensors import Tensors, open_tensors

COLUMN, ROW = 0, 1
_SPLIT = {
    **dict.fromkeys(("wq", "wk", "wv", "w1", "w3", "output"), COLUMN),
    **dict.fromkeys(("wo", "w2"), ROW),
}
_WHOLE = re.compile(r"(.*norm\.weight|rope\.freqs)$")
_FILE = re.compile(r"consolidated\.(\d+)\.pth$")


def shard_files(folder: Path) -> list[Path]:
    """Returns the parts in a folder, in order. Raises CheckpointError if their numbers have gaps."""
    files = {int(m[1]): p for p in folder.iterdir() if (m := _FILE.match(p.name))}
    if missing := sorted(set(range(max(files, default=-1) + 1)) - files.keys()):
        raise CheckpointError(
            f"{folder} has {len(files)} parts, but lacks "
            + ", ".join(f"consolidated.{n:02d}.pth" for n in missing[:8])
            + ": the download or copy is incomplete"
        )
    return [files[n] for n in sorted(files)]


def open_shards(
    files: Sequence[Path], *, heads: int | None, kv_heads: int | None, allow_pickle: bool
) -> Tensors:
    """Returns the whole tensors of a model in parts, under Meta's names.

    `heads` and `kv_heads` are those of the whole model; `kv_heads` matters if there are more parts than kv heads.

    Raises CheckpointError for parts that hold different names, shapes or dtypes, for a norm that is not the same in all
    of them, for a tensor whose split is unknown, and for sizes that show that parts are missing.
    """
    parts = [open_tensors(file, allow_pickle=allow_pickle) for file in files]
    if len(parts) == 1:
        return parts[0]
    for file, part in zip(files, parts, strict=True):
        if part.forms.keys() != parts[0].forms.keys():
            odd = sorted(part.forms.keys() ^ parts[0].forms.keys())
            raise CheckpointError(f"{file} and {files[0].name} hold different tensors: {', '.join(odd[:5])}")
        for name, form in part.forms.items():
            first = parts[0].forms[name]
            if (form.shape, form.dtype) != (first.shape, first.dtype):
                raise CheckpointError(
                    f"{file}: {name} is {list(form.shape)} {form.dtype}, but {list(first.shape)} {first.dtype} "
                    f"in {files[0].name}: they are parts of different models"
                )
    if "norm.weight" not in parts[0] or len(parts[0].forms["norm.weight"].shape) != 1:
        raise CheckpointError(
            f"{files[0]} has no norm.weight of shape [width]: not a LLaMA checkpoint in Meta's format"
        )
    whole = _Parts(files, parts, parts[0].forms["norm.weight"].shape[0], heads, kv_heads)
    return Tensors({name: whole.join(name) for name in parts[0]})


@dataclass(frozen=True)
class _Parts:
    """The parts of a model of `width`, and how to join their tensors."""

    files: Sequence[Path]
    parts: Sequence[Tensors]
    width: int
    heads: int | None
    kv_heads: int | None

    def join(self, name: str) -> Entry:
        """Returns a whole tensor: the parts concatenated along the axis that was split."""
        axis, numbers = self.split(name)
        first, *more = entries = [self.parts[number].forms[name] for number in numbers]
        if not more:
            return first
        step = [size if i == axis else 0 for i, size in enumerate(first.shape)]
        boxes = tuple(Box(tuple(n * size for size in step), entry) for n, entry in enumerate(entries))
        shape = tuple(size + n * len(more) for size, n in zip(first.shape, step, strict=True))
        return Whole(shape, first.dtype, first.file, 0, None, boxes)

    def split(self, name: str) -> tuple[int, Sequence[int]]:
        """Returns the axis that was split, and the numbers of the parts to concatenate along it."""
        everyone, shape = range(len(self.parts)), self.parts[0].forms[name].shape
        if _WHOLE.match(name):
            self.must_agree(name, everyone)
            return 0, (0,)
        if len(shape) != 2:
            raise CheckpointError(f"{self.files[0]}: {name} must be a matrix, got shape {list(shape)}")
        module = name.split(".")[-2]
        if name == "tok_embeddings.weight":
            axis = COLUMN if shape[1] == self.width else ROW
            width = shape[1] * (len(self.parts) if axis else 1)
        elif module not in _SPLIT or not name.endswith(".weight"):
            raise CheckpointError(
                f"{self.files[0]}: unknown tensor {name}: Meta's LLaMA has none of this name"
            )
        else:
            axis = _SPLIT[module]
            width = shape[axis] * len(self.parts) if module in ("wq", "wo") else self.width
        if width != self.width:
            raise CheckpointError(
                f"{self.files[0].parent}: the {len(self.files)} parts of {name} have width {width} together, but the "
                f"norms have {self.width}: parts are missing, or belong to different models"
            )
        return axis, self.kv_parts(name) if module in ("wk", "wv") else everyone

    def kv_parts(self, name: str) -> Sequence[int]:
        """Returns the parts whose rows of wk or wv are joined: 0, 2, 4, 6 if 8 parts of 4 kv heads hold each twice."""
        count, heads = len(self.parts), self.heads
        if heads is None or self.width % heads:
            raise CheckpointError(
                f"{self.files[0].parent}: params.json must give n_heads, a divisor of width {self.width}, got {heads}"
            )
        rows, head_dim = self.parts[0].forms[name].shape[0], self.width // heads
        kv_heads = heads if self.kv_heads is None else self.kv_heads
        if rows * count == kv_heads * head_dim:
            return range(count)
        copies, odd = divmod(count, kv_heads)
        if rows != head_dim or odd:
            raise CheckpointError(
                f"{self.files[0].parent}: {count} parts of {name} with {rows} rows each are neither a split of "
                f"{kv_heads} kv heads of {head_dim} dims nor copies of whole heads; check n_kv_heads in params.json"
            )
        for first in range(0, count, copies):
            self.must_agree(name, range(first, first + copies))
        return range(0, count, copies)

    def must_agree(self, name: str, numbers: Sequence[int]) -> None:
        """Raises CheckpointError unless the tensor is equal in all of these parts."""
        first = self.parts[numbers[0]][name]
        for number in numbers[1:]:
            if not torch.equal(self.parts[number][name], first):
                raise CheckpointError(
                    f"{self.files[number]}: {name} must equal that in {self.files[numbers[0]].name}, but differs: they "
                    "are parts of different models"
                )
