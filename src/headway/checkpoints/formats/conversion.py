"""Convert a checkpoint and show that it is the same function: nothing is left at the target unless that was
seen. Where its numbers are rounded to another dtype, that is shown of the function with rounded numbers.

The source is evaluated by its own forward pass (Meta's formats: a plain one on their names, independent of
`Decoder`) and the target by loading the folder that was just written, before it takes its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headway.checkpoints.folder import (
    SHARD_BYTES,
    SavesItself,
    TokenizerFiles,
    check_target,
    load_folder,
    save_state,
)
from headway.checkpoints.formats import llama2c, meta
from headway.checkpoints.heads import change_pairing, repeat_kv_heads
from headway.checkpoints.hf.config import transformers_verdict
from headway.checkpoints.restore import fill, load_model
from headway.checkpoints.storage.dtypes import check_dtypes, dtype_name
from headway.checkpoints.storage.lazy import cast, forms
from headway.checkpoints.storage.tensors import open_tensors
from headway.errors import CheckpointError
from headway.models import ModelSpec
from headway.positions import Pairing, Rotary

Format = Literal["auto", "hf", "llama2c", "meta", "torchtune"]
FORMATS: tuple[Format, ...] = ("auto", "hf", "llama2c", "meta", "torchtune")
PROBE = 64
FLOAT32_BOUND = 1e-5


@dataclass(frozen=True)
class Check:
    """One comparison of logits: the largest difference between source and target, and how much is allowed.

    `bound` is 1e-5 of the largest logit in float32; in bfloat16 it is twice what bfloat16 itself costs the
    source (its distance from the source in float32)."""

    dtype: str
    tokens: int
    difference: float
    largest_logit: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the difference is within the bound (a NaN is not)."""
        return self.difference <= self.bound


@dataclass(frozen=True)
class Conversion:
    """What was converted, and the evidence that it is the same function.

    `rounding` is the largest change of a logit by storing the weights in `dtype`, float32 against float32; None
    where they are stored as they were. The checks are then against the source with its weights rounded so."""

    source: Path
    target: Path
    format: str
    spec: ModelSpec
    source_pairing: str
    target_pairing: str
    source_kv_heads: int
    dtype: str
    rounding: float | None
    transformers: str
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class _Source:
    """A model and its own forward pass: `forward(weights, dtype, ids)` are the logits of a row of ids."""

    format: str
    spec: ModelSpec
    state: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    forward: Callable[[Mapping[str, Tensor], torch.dtype, Tensor], Tensor]
    tokenizer: SavesItself | None = None
    generation: Mapping[str, Any] | None = None

    @torch.no_grad()
    def logits(self, ids: Tensor, dtype: torch.dtype, rounded: torch.dtype | None) -> Tensor:
        """Logits of `ids`, computed in a dtype, from weights that are rounded to another first, or not: None."""
        weights = self.weights if rounded is None else cast(self.weights, rounded)
        return self.forward(weights, dtype, ids)


def convert(
    source: str | Path,
    target: str | Path,
    *,
    frm: Format = "auto",
    to_pairing: Pairing = "halves",
    kv_heads: int | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: SavesItself | None = None,
    heads: int | None = None,
    norm_eps: float | None = None,
    allow_pickle: bool = False,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Conversion:
    """Write `source` as a folder at `target`, and compare their logits before it takes that name.

    Args:
        frm: the format; "auto" detects it from the file.
        to_pairing: rotary pairing of the result: "halves", "adjacent" or explicit pairs.
        kv_heads: key and value heads of the result, by exact repetition (`repeat_kv_heads`); None keeps them.
        dtype: stored dtype of the result; None keeps the source's.
        tokenizer: saved along; a folder's own is copied.
        heads, norm_eps: for pickles without params.json.

    Values are read, changed and written one at a time. Raises CheckpointError, leaving `target` as it was, when
    the logits differ, when `target` exists (unless `overwrite`), or when the source cannot be read.
    """
    source, target = Path(source), Path(target)
    check_target(target, overwrite)
    found = _open(source, frm, heads, norm_eps, allow_pickle)
    state, spec = found.state, found.spec
    if kv_heads is not None:
        state, spec = repeat_kv_heads(state, spec, kv_heads)
    if isinstance(spec.positions, Rotary):
        state, spec = change_pairing(state, spec, to_pairing)
    elif to_pairing != "halves":
        raise CheckpointError(f"{source} has no rotary positions, and so no pairing to change")
    stored = {form.dtype for form in forms(state).values()}
    narrowed = dtype is not None and any(torch.promote_types(d, dtype) != dtype for d in stored)
    if dtype is not None:
        check_dtypes({dtype_name(dtype): dtype}, target)
        state = cast(state, dtype)
    rounded = dtype if narrowed else None
    ids = _probe(spec)
    exact = found.logits(ids, torch.float32, rounded)
    rounding = None if rounded is None else _difference(found.logits(ids, torch.float32, None), exact)
    checks: list[Check] = []

    def compare(folder: Path) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            check = _check(found, rounded, exact, folder, dtype, ids)
            checks.append(check)
            if not check.passed:
                raise CheckpointError(
                    f"{source} and its conversion differ: logits by up to {check.difference:.3g} in {check.dtype} "
                    f"(allowed {check.bound:.3g}, largest logit {check.largest_logit:.3g}); {target} was not written"
                )

    save_state(
        target,
        spec,
        state,
        tokenizer=tokenizer or found.tokenizer,
        generation=found.generation,
        keep_pairing=True,
        overwrite=overwrite,
        shard_bytes=shard_bytes,
        before_publishing=compare,
    )
    return Conversion(
        source=source,
        target=target,
        format=found.format,
        spec=spec,
        source_pairing=_pairing(found.spec),
        target_pairing=_pairing(spec),
        source_kv_heads=found.spec.kv_heads,
        dtype=", ".join(sorted({dtype_name(form.dtype) for form in forms(state).values()})),
        rounding=rounding,
        transformers=transformers_verdict(spec),
        checks=tuple(checks),
    )


def _open(
    source: Path, frm: Format, heads: int | None, norm_eps: float | None, allow_pickle: bool
) -> _Source:
    if frm not in FORMATS:
        raise CheckpointError(f"unknown format {frm!r}; known are {', '.join(FORMATS)}")
    if not source.exists():
        raise CheckpointError(f"there is no file or folder {source}")
    frm = _detect(source, allow_pickle) if frm == "auto" else frm
    if frm == "hf":
        folder = load_folder(source, allow_pickle=allow_pickle)

        def forward(weights: Mapping[str, Tensor], dtype: torch.dtype, ids: Tensor) -> Tensor:
            row: Tensor = fill(folder.spec, weights, dtype=dtype)(ids[None])[0]
            return row

        files = TokenizerFiles(folder)
        return _Source(frm, folder.spec, folder.tensors, folder.tensors, forward, files, folder.generation)
    if frm == "llama2c":
        model = llama2c.read(source)
    else:
        model = meta.read_pickled(
            source, layout=frm, allow_pickle=allow_pickle, heads=heads, norm_eps=norm_eps
        )
    return _Source(
        frm,
        model.spec,
        model.state(),
        model.weights,
        lambda weights, dtype, ids: meta.MetaModel(model.spec, cast(weights, dtype)).logits(ids),
        generation=llama2c.GENERATION if frm == "llama2c" else None,
    )


def _detect(source: Path, allow_pickle: bool) -> Format:
    if source.is_dir():
        meta_files = not (source / "config.json").exists() and any(source.glob("consolidated.*.pth"))
        return "meta" if meta_files else "hf"
    if source.suffix == ".bin" and llama2c.looks_like(source):
        return "llama2c"
    if source.suffix in (".pt", ".pth", ".bin"):
        names = list(open_tensors(source, allow_pickle=allow_pickle))
        if any(".attention.wq." in name for name in names):
            return "meta"
        if any(".attn.q_proj." in name for name in names):
            return "torchtune"
    raise CheckpointError(
        f"{source} is no format that headway detects (a Hugging Face folder, llama2.c's .bin, a pickle of Meta or "
        f"torchtune); use --from {', '.join(FORMATS[1:])}"
    )


def _probe(spec: ModelSpec) -> Tensor:
    """One row of token ids, each drawn evenly from the whole vocabulary."""
    length = min(PROBE, spec.trained_context, spec.context_limit or PROBE)
    return torch.randint(spec.vocab, (length,), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _check(
    found: _Source, rounded: torch.dtype | None, exact: Tensor, folder: Path, dtype: torch.dtype, ids: Tensor
) -> Check:
    """The converted folder against its source, whose logits in float32 are `exact`."""
    ours = load_model(folder, dtype=dtype)(ids[None])[0].float()
    largest = float(exact.abs().max())
    bound = FLOAT32_BOUND * largest
    if dtype != torch.float32:
        bound = 2 * _difference(found.logits(ids, dtype, rounded).float(), exact)
    return Check(dtype_name(dtype), len(ids), _difference(ours, exact), largest, bound)


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _pairing(spec: ModelSpec) -> str:
    return str(spec.positions.pairing) if isinstance(spec.positions, Rotary) else "none"
