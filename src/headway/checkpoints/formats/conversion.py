"""Convert a checkpoint and show that it is the same function: nothing is left at the target unless that was
seen. Where its numbers are rounded to another dtype, that is shown of the function with rounded numbers.

The source is evaluated by its own forward pass (Meta's formats: a plain one on their names, independent of
`Decoder`) and the target by loading the folder that was just written, before it takes its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headway.checkpoints.formats.gguf.metadata import ARCHITECTURES, architecture_of
from headway.checkpoints.formats.gguf.model import write_model
from headway.checkpoints.formats.sources import Format, Source, open_source
from headway.checkpoints.formats.storing import Target, storage_of
from headway.checkpoints.heads import change_pairing, pairing_name, repeat_kv_heads
from headway.checkpoints.hf.config import transformers_verdict
from headway.checkpoints.restore import load_model
from headway.checkpoints.saving import SHARD_BYTES, check_target, save_state
from headway.errors import CheckpointError
from headway.models import ModelSpec
from headway.positions import Pairing, Rotary
from headway.storage.dtypes import dtype_name
from headway.storage.gguf import read_gguf
from headway.storage.lazy import lazy
from headway.text import Tokenizer

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

    Attributes:
        to: the format of the target.
        dtype: of the stored weights; of a GGUF file, the types.
        not_packed: matrices whose rows are no multiples of the blocks asked for, which are stored as they were.
        layers: what became of layers of 8 or 4 bits, a sentence for each way.
        rounding: the largest change of a logit by storing the weights in `dtype`, float32 against float32; None where
            they are stored as they were. The checks are then against the source with its weights rounded so.
        transformers: whether it loads the target; None for a GGUF file.
    """

    source: Path
    target: Path
    format: str
    to: Target
    spec: ModelSpec
    source_pairing: str
    target_pairing: str
    source_kv_heads: int
    dtype: str
    not_packed: tuple[str, ...]
    layers: tuple[str, ...]
    rounding: float | None
    transformers: str | None
    checks: tuple[Check, ...]


def convert(
    source: str | Path,
    target: str | Path,
    *,
    frm: Format = "auto",
    to: Target | None = None,
    to_pairing: Pairing | None = None,
    kv_heads: int | None = None,
    dtype: torch.dtype | str | None = None,
    tokenizer: Tokenizer | None = None,
    allow_pickle: bool = False,
    overwrite: bool = False,
    shard_bytes: int | None = None,
) -> Conversion:
    """Write `source` as a folder or a GGUF file at `target`, and compare their logits before it takes that name.

    Args:
        frm: the format; "auto" detects it from the file.
        to: "hf" or "gguf"; None is "gguf" where the target's name ends in .gguf.
        to_pairing: rotary pairing of a folder: "halves" (None), "adjacent" or explicit pairs; in a GGUF file it is that
            of its architecture.
        kv_heads: key and value heads of the result, by exact repetition (`repeat_kv_heads`); None keeps them.
        dtype: stored dtype of the result, of a GGUF file that of its matrices: a torch dtype, or "q8_0", "q4_k", ...
            None keeps the source's.
        tokenizer: saved along; the source's own is taken along.
        shard_bytes: the most that one file of a folder's weights holds.

    Values are read, changed and written one at a time. Raises CheckpointError, leaving `target` as it was, when
    the logits differ, when `target` exists (unless `overwrite`), or when the source cannot be read.
    """
    source, target = Path(source), Path(target)
    to = to or ("gguf" if target.suffix == ".gguf" else "hf")
    check_target(target, overwrite)
    if to == "gguf" and (to_pairing is not None or shard_bytes is not None):
        raise CheckpointError(
            "a GGUF file is one file in the pairing of its architecture: leave out to_pairing and shard_bytes"
        )
    found = open_source(source, frm, allow_pickle)
    storage = storage_of(found, to, dtype)
    state: Mapping[str, Tensor] = storage.state
    spec = found.spec
    if kv_heads is not None:
        state, spec = repeat_kv_heads(state, spec, kv_heads)
    if isinstance(spec.positions, Rotary):
        pairing = ARCHITECTURES[architecture_of(spec)].pairing if to == "gguf" else to_pairing or "halves"
        state, spec = change_pairing(state, spec, pairing)
    elif to_pairing not in (None, "halves"):
        raise CheckpointError(f"{source} has no rotary positions, and so no pairing to change")
    ids, rounded = _probe(spec), storage.rounded(found.weights)
    with torch.no_grad():
        reference = found.forward(rounded, torch.float32, ids)
        rounding = _difference(found.forward(found.weights, torch.float32, ids), reference) or None
    checks: list[Check] = []

    def compare(written: Path) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            check = _check(found, rounded, reference, written, dtype, ids)
            checks.append(check)
            if not check.passed:
                raise CheckpointError(
                    f"{source} and its conversion differ: logits by up to {check.difference:.3g} in {check.dtype} "
                    f"(allowed {check.bound:.3g}, largest logit {check.largest_logit:.3g}); {target} was not written"
                )

    carried = tokenizer or found.tokenizer
    not_packed: tuple[str, ...] = ()
    if to == "gguf":
        keys = None if carried is None else carried.gguf_metadata(spec.vocab)
        generation = found.generation or {}
        write_model(
            target, spec, state, storage.asked,
            packed=storage.kept, tokenizer=keys, generation=generation, check=compare,
        )  # fmt: skip
        tensors = read_gguf(target).tensors
        stored = {one.type.name for one in tensors.values()}
        if storage.asked is not None:
            matrices = {name: one.type for name, one in tensors.items() if len(one.numbers) > 1}
            not_packed = tuple(name for name, kind in matrices.items() if kind is not storage.asked)
    else:
        state = storage.rounded(state)
        stored = {dtype_name(form.dtype) for form in lazy(state).forms.values()}
        save_state(
            target,
            spec,
            state,
            tokenizer=carried,
            generation=found.generation,
            keep_pairing=True,
            overwrite=overwrite,
            shard_bytes=SHARD_BYTES if shard_bytes is None else shard_bytes,
            before_publishing=compare,
        )
    return Conversion(
        source=source,
        target=target,
        format=found.format,
        to=to,
        spec=spec,
        source_pairing=pairing_name(found.spec),
        target_pairing=pairing_name(spec),
        source_kv_heads=found.spec.kv_heads,
        dtype=", ".join(sorted(stored)),
        not_packed=not_packed,
        layers=storage.layers,
        rounding=rounding,
        transformers=None if to == "gguf" else transformers_verdict(spec),
        checks=tuple(checks),
    )


def _probe(spec: ModelSpec) -> Tensor:
    """One row of token ids, each drawn evenly from the whole vocabulary."""
    length = min(PROBE, spec.trained_context, spec.context_limit or PROBE)
    return torch.randint(spec.vocab, (length,), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _check(
    found: Source,
    rounded: Mapping[str, Tensor],
    exact: Tensor,
    written: Path,
    dtype: torch.dtype,
    ids: Tensor,
) -> Check:
    """The converted model against its source, whose logits in float32 are `exact`."""
    ours = load_model(written, dtype=dtype, dequantize=True)(ids[None])[0].float()
    largest = float(exact.abs().max())
    bound = FLOAT32_BOUND * largest
    if dtype != torch.float32:
        bound = 2 * _difference(found.forward(rounded, dtype, ids).float(), exact)
    return Check(dtype_name(dtype), len(ids), _difference(ours, exact), largest, bound)


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
