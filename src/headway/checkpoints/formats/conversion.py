"""Convert a checkpoint and show that it is the same function: nothing is left at the target unless that was
seen. Where its numbers are rounded to another dtype, that is shown of the function with rounded numbers.

The source is evaluated by its own forward pass (Meta's formats: a plain one on their names, independent of
`Decoder`) and the target by loading the folder that was just written, before it takes its name.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from headway.checkpoints.folder import Format, load_folder
from headway.checkpoints.formats.meta import MetaModel
from headway.checkpoints.formats.storing import Storage, storage_of
from headway.checkpoints.heads import change_pairing, repeat_kv_heads
from headway.checkpoints.hf.layouts import layouts_for
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
from headway.errors import CheckpointError
from headway.positions import Pairing, rotations
from headway.storage.dtypes import dtype_name
from headway.storage.lazy import Form, cast, with_values
from headway.text import Tokenizer

PROBE = 64
FLOAT32_BOUND = 1e-5
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
    """Write `source` as a folder or a GGUF file at `target`, and compare their logits before it takes that name.

    Args:
        frm: the format; "auto" detects it from the file.
        to: "hf" or "gguf"; None is "gguf" where the target's name ends in .gguf.
        to_pairing: rotary pairing of a folder: "halves", "adjacent" or explicit pairs; None is that of its family, and
            in a GGUF file it is that of its architecture.
        kv_heads: key and value heads of the result, by exact repetition (`repeat_kv_heads`); None keeps them.
        dtype: stored dtype of the result, of a GGUF file that of its matrices: a torch dtype, or "q8_0", "q4_k", ...
            None keeps the source's.
        tokenizer: saved along; the source's own is taken along.
        shard_bytes: the most that one file of a folder's weights holds.

    The largest difference may be 1e-5 of the largest logit in float32; in bfloat16 twice what bfloat16 itself costs the
    source (its distance from the source in float32).

    Values are read, changed and written one at a time. Raises CheckpointError, leaving `target` as it was, when
    the logits differ, when `target` exists (unless `overwrite`), or when the source cannot be read.
    """
    to = to or target_of(target)
    check_target(target, overwrite)
    if to == "gguf" and (to_pairing is not None or shard_bytes is not None):
        raise CheckpointError(
            "a GGUF file is one file in the pairing of its architecture: leave out to_pairing and shard_bytes"
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
        raise CheckpointError(f"{source} has no rotary positions, and so no pairing to change")
    length = min(PROBE, spec.trained_context, spec.context_limit or PROBE)
    ids = probe(spec, None, length)
    weights, forward = _reference(storage, ids)
    rounded = storage.rounded(weights)
    exact = forward(rounded, torch.float32)

    def measure(written: Path) -> Measured:
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            ours = load_model(written, dtype=dtype, dequantize=True)(ids[None])[0].float()
            largest = float(exact.abs().max())
            bound = FLOAT32_BOUND * largest
            if dtype != torch.float32:
                bound = 2 * _largest(forward(rounded, dtype).float() - exact)
            check = Difference(
                tokens=length, probed=length, dtype=dtype_name(dtype), difference=_largest(ours - exact),
                largest=largest, bound=bound,
            )  # fmt: skip
            if not check.passed:
                raise CheckpointError(
                    f"{source} and its conversion differ: logits by up to {check.difference:.3g} in {check.dtype} "
                    f"(allowed {bound:.3g}, largest logit {largest:.3g}); {target} was not written"
                )
            found.append(check)
        return Measured(tuple(found), rounding=rounding or None)

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
    """The weights of a folder, codes of 8 or 4 bits as what they are in float32, and the forward pass of its format,
    whose logits [T, V] of the row `ids` they give."""
    folder = storage.folder
    if folder.format in ("llama2c", "meta"):
        model = MetaModel(folder.spec, folder.stored, folder.path)
        return folder.stored, lambda weights, dtype: model.logits(cast(weights, dtype), ids)
    exact = {name: Form(layer.form.shape, torch.float32) for name, layer in storage.coded.items()}
    weights = with_values(folder.tensors, exact, lambda name: storage.coded[name].read().dequantize())
    return weights, lambda weights, dtype: fill(folder.spec, weights, dtype=dtype)(ids[None])[0]


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())
