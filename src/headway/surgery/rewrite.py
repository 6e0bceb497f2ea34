"""A folder becomes another one, and what changed is reported: measured before and after, never assumed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from headway.checkpoints import Folder, load_folder, save_state
from headway.checkpoints.hf.config import transformers_verdict
from headway.checkpoints.saving import TokenizerFiles
from headway.choice import Choice
from headway.models import ModelSpec, cost
from headway.models.difference import differences
from headway.native.panels import Panels
from headway.storage.dtypes import dtype_name
from headway.train.evaluation import Bucket, Evaluation

LONGEST_ROW = 2048


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A model before or after.

    Attributes:
        parameters: trained numbers. stored_bytes: of all tensors in its files.
        kv_bytes_per_token: of keys and values in all layers, in the dtype that is stored.
        kv_bytes_stored: what the caches of one row of `Rewritten.context` tokens hold; 0 of an encoder, which has none.
        pairs: scores of such a row in all layers and heads.
        loss: nats per token. bits_per_byte: of the text. perplexity: exp(loss). None without a text.
        positions: the loss by how far a prediction could look back.
    """

    parameters: int
    stored_bytes: int
    kv_bytes_per_token: int
    kv_bytes_stored: int
    pairs: int
    loss: float | None = None
    bits_per_byte: float | None = None
    perplexity: float | None = None
    positions: tuple[Bucket, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest difference of an output on one row of `tokens`, and the largest output before, in absolute value.

    probed: the last slots, which were compared. marked: whether the first token was global.
    """

    tokens: int
    probed: int
    marked: bool = False
    difference: float
    largest: float


class Measured(NamedTuple):
    """What is found of two models.

    differences: of outputs on rows. evaluated: either on a text.
    kl: mean over its predictions of the sum over the vocab of p ln(p / q), p the first model's.
    """

    differences: tuple[Difference, ...] = ()
    evaluated: tuple[Evaluation, Evaluation] | None = None
    kl: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """A folder that was made of another one, and the evidence.

    Attributes:
        changed: aspects of the spec that differ (`differences`): (aspect, before, after); and how weights are stored,
            where those of one of the two are quantized, which surgery keeps in none.
        transformers: whether transformers reads the new folder, and what keeps it from that.
        dtype: that the weights are run in.
        choices: what was chosen, with reasons.
        context: tokens of a row in all measurements. unchanged: rows of up to so many tokens see what they saw.
        tokens: predictions that the losses are means of. kl: as in `Measured`.
    """

    source: Path
    target: Path
    changed: tuple[tuple[str, str, str], ...]
    transformers: str
    dtype: str
    choices: tuple[Choice, ...]
    context: int
    unchanged: int
    before: Measurement
    after: Measurement
    differences: tuple[Difference, ...]
    tokens: int
    kl: float | None


def rewrite(
    folder: Folder,
    target: str | Path,
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    measure: Callable[[Path], Measured],
    *,
    quantized: Mapping[str, Panels] = MappingProxyType({}),
    context: int,
    unchanged: int = 0,
    choices: tuple[Choice, ...] = (),
    tokenizer: TokenizerFiles | None = None,
    metadata: Mapping[str, str] = MappingProxyType({}),
    overwrite: bool = False,
) -> Rewritten:
    """Write `folder` at `target` with another spec and other weights (`state` and `quantized` as for `save_state`), its
    tokenizer unless another is given, and its generation settings. `measure` is called with the new folder before it
    takes its name; if it raises, `target` stays as it was."""
    found: list[Measured] = []
    save_state(
        target,
        spec,
        state,
        quantized,
        tokenizer=TokenizerFiles(folder) if tokenizer is None else tokenizer,
        generation=folder.generation,
        keep_pairing=True,
        metadata=metadata,
        overwrite=overwrite,
        before_publishing=lambda path: found.append(measure(path)),
    )
    (measured,), written, (dtype, _) = found, load_folder(target), folder.choose_dtype()
    was, now = measured.evaluated or (None, None)
    coded = folder.quantized or written.quantized
    return Rewritten(
        source=folder.path,
        target=Path(target),
        changed=(
            *differences(folder.spec, spec),
            *([("weights", folder.weights, written.weights)] if coded else []),
        ),
        transformers=transformers_verdict(spec),
        dtype=dtype_name(dtype),
        choices=choices,
        context=context,
        unchanged=unchanged,
        before=_measurement(folder, was, context, dtype),
        after=_measurement(written, now, context, dtype),
        differences=measured.differences,
        tokens=0 if was is None else was.tokens,
        kl=measured.kl,
    )


def _measurement(folder: Folder, found: Evaluation | None, context: int, dtype: torch.dtype) -> Measurement:
    spec = folder.spec
    names = () if found is None else ("loss", "bits_per_byte", "perplexity", "positions")
    return Measurement(
        parameters=cost.parameter_count(spec),
        stored_bytes=folder.stored.nbytes,
        kv_bytes_per_token=cost.kv_bytes_per_token(spec, dtype) if spec.causal else 0,
        kv_bytes_stored=cost.kv_bytes_stored(spec, context, dtype) if spec.causal else 0,
        pairs=cost.attention_pairs(spec, context),
        **{name: getattr(found, name) for name in names},
    )


def row_length(before: ModelSpec, after: ModelSpec, beyond: int = 0) -> int:
    """Tokens of a row to measure in: the longer trained context, at most 2048 or twice `beyond`, and more than it."""
    usual = min(max(before.trained_context, after.trained_context), max(LONGEST_ROW, 2 * beyond))
    wanted = usual if usual > beyond else 2 * beyond
    return min(n for n in (wanted, after.context_limit) if n is not None)


def probe(spec: ModelSpec, ids: ArrayLike | None, count: int) -> Tensor:
    """One row [T] of at most `count` tokens: the first of `ids`, or drawn evenly from the whole vocabulary."""
    if ids is None:
        return torch.randint(spec.vocab, (count,), generator=torch.Generator().manual_seed(0))
    return torch.tensor(np.asarray(ids)[:count], dtype=torch.int64)
