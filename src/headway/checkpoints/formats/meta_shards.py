"""Meta's model-parallel files, consolidated.00.pth, consolidated.01.pth, ...: joined to one model lazily.

fairscale's layers split a matrix [out, in] of torch (`fairscale.nn.model_parallel.layers`):

    ColumnParallelLinear     rows, axis 0         wq, wk, wv, w1, w3, output
    RowParallelLinear        columns, axis 1      wo, w2
    ParallelEmbedding        columns, axis 1      tok_embeddings of LLaMA 1 and 2
    VocabParallelEmbedding   rows, axis 0         tok_embeddings of LLaMA 3
    norms, rope.freqs        whole in every part

With more parts than kv heads, every kv head is in several consecutive parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from headway.checkpoints.storage.lazy import Form, LazyTensors
from headway.checkpoints.storage.tensors import Tensors, open_tensors
from headway.errors import CheckpointError

COLUMN, ROW = 0, 1
_SPLIT: Mapping[str, int] = MappingProxyType(
    {
        "wq": COLUMN,
        "wk": COLUMN,
        "wv": COLUMN,
        "w1": COLUMN,
        "w3": COLUMN,
        "output": COLUMN,
        "wo": ROW,
        "w2": ROW,
    }
)
_WHOLE = re.compile(r"(.*norm\.weight|rope\.freqs)$")
_FILE = re.compile(r"consolidated\.(\d+)\.pth$")


def shard_files(folder: Path) -> list[Path]:
    """The parts in a folder, in order. Raises CheckpointError when one is missing between others."""
    found = {int(m[1]): p for p in folder.iterdir() if (m := _FILE.match(p.name))}
    if missing := sorted(set(range(max(found, default=-1) + 1)) - found.keys()):
        raise CheckpointError(
            f"{folder} holds {len(found)} parts, but lacks "
            + ", ".join(f"consolidated.{n:02d}.pth" for n in missing[:8])
            + ": the download or copy is incomplete"
        )
    return [found[n] for n in sorted(found)]


def open_shards(
    files: Sequence[Path], *, heads: int | None, kv_heads: int | None, allow_pickle: bool
) -> LazyTensors:
    """The whole tensors of a model in parts, under Meta's names.

    heads, kv_heads     of the whole model; kv_heads matters where there are fewer than parts.

    Raises CheckpointError for parts that hold different names, shapes or dtypes, for a norm that is not the
    same in all of them, for a tensor whose split is not known, and for sizes that show that parts are missing.
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
    width = _width(files, parts)
    joins = {name: _join(files, parts, name, width, heads, kv_heads) for name in parts[0]}
    return _Merged(parts, joins)


@dataclass(frozen=True)
class _Join:
    """How one tensor is put together: `axis` None takes the first part; else those of `taken`, in order."""

    axis: int | None
    taken: tuple[int, ...]


class _Merged(LazyTensors):
    def __init__(self, parts: Sequence[Tensors], joins: Mapping[str, _Join]) -> None:
        self._parts, self._joins = parts, joins
        self._forms = MappingProxyType({name: self._form(name) for name in joins})

    def _form(self, name: str) -> Form:
        form, join = self._parts[0].forms[name], self._joins[name]
        shape = list(form.shape)
        if join.axis is not None:
            shape[join.axis] *= len(join.taken)
        return Form(tuple(shape), form.dtype)

    @property
    def forms(self) -> Mapping[str, Form]:
        return self._forms

    def __getitem__(self, name: str) -> Tensor:
        self.check_name(name)
        form = self._forms[name]
        value = torch.empty(form.shape, dtype=form.dtype)
        self.copy_into(name, value)
        return value

    def copy_into(self, name: str, target: Tensor) -> None:
        self.check_name(name)
        join = self._joins[name]
        if join.axis is None:
            self._parts[0].copy_into(name, target)
            return
        length = self._parts[0].forms[name].shape[join.axis]
        for place, number in enumerate(join.taken):
            self._parts[number].copy_into(name, target.narrow(join.axis, place * length, length))


def _width(files: Sequence[Path], parts: Sequence[Tensors]) -> int:
    if "norm.weight" not in parts[0] or len(parts[0].forms["norm.weight"].shape) != 1:
        raise CheckpointError(f"{files[0]} has no norm.weight [width], by which the other sizes are known")
    return parts[0].forms["norm.weight"].shape[0]


def _join(
    files: Sequence[Path],
    parts: Sequence[Tensors],
    name: str,
    width: int,
    heads: int | None,
    kv_heads: int | None,
) -> _Join:
    everyone = tuple(range(len(parts)))
    if _WHOLE.match(name):
        _must_agree(files, parts, name, everyone)
        return _Join(None, everyone)
    shape = parts[0].forms[name].shape
    if len(shape) != 2:
        raise CheckpointError(f"{files[0]}: {name} is {list(shape)}: how it was split is not known")
    if name == "tok_embeddings.weight":
        axis = COLUMN if shape[1] == width else ROW
        _fits(files, name, shape[1] * (len(parts) if axis else 1), width)
        return _Join(axis, everyone)
    module = name.split(".")[-2]
    if module not in _SPLIT or not name.endswith(".weight"):
        raise CheckpointError(f"{files[0]}: there is no place for {name} in Meta's LLaMA")
    axis = _SPLIT[module]
    if module in ("wk", "wv"):
        return _Join(axis, _kv_parts(files, parts, name, width, heads, kv_heads))
    if module in ("wq", "wo"):
        _fits(files, name, shape[axis] * len(parts), width)
    return _Join(axis, everyone)


def _fits(files: Sequence[Path], name: str, found: int, width: int) -> None:
    if found != width:
        raise CheckpointError(
            f"{files[0].parent}: the {len(files)} parts of {name} are {found} wide together, but the norms say "
            f"{width}: parts are missing, or belong to different models"
        )


def _kv_parts(
    files: Sequence[Path],
    parts: Sequence[Tensors],
    name: str,
    width: int,
    heads: int | None,
    kv_heads: int | None,
) -> tuple[int, ...]:
    """The parts whose rows of wk or wv follow one another in the whole matrix."""
    everyone = tuple(range(len(parts)))
    if heads is None or width % heads:
        raise CheckpointError(
            f"{files[0]}: the number of heads is not in the tensors, and {width} rows are not {heads} heads: "
            "put params.json into its folder, or use --heads"
        )
    rows, head_dim = parts[0].forms[name].shape[0], width // heads
    kv_heads = heads if kv_heads is None else kv_heads
    if rows * len(parts) == kv_heads * head_dim:
        return everyone
    copies, odd = divmod(len(parts), kv_heads)
    if rows != head_dim or odd:
        raise CheckpointError(
            f"{files[0].parent}: {len(parts)} parts of {name} with {rows} rows each are neither a split of {kv_heads} "
            f"kv heads of {head_dim} nor copies of whole ones; is n_kv_heads right in params.json?"
        )
    for first in range(0, len(parts), copies):
        _must_agree(files, parts, name, range(first, first + copies))
    return everyone[::copies]


def _must_agree(files: Sequence[Path], parts: Sequence[Tensors], name: str, numbers: Sequence[int]) -> None:
    first = parts[numbers[0]][name]
    for number in numbers[1:]:
        if not torch.equal(parts[number][name], first):
            raise CheckpointError(
                f"{files[number]}: {name} differs from that in {files[numbers[0]].name}, but both must hold the same: "
                "they are parts of different models"
            )
