"""Rewrites a model folder as another one and reports what changed, with measurements before and after."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from headway.checkpoints.folder import Folder, load_folder
from headway.checkpoints.formats.gguf.architectures import ARCHITECTURES
from headway.checkpoints.formats.gguf.metadata import architecture_of
from headway.checkpoints.formats.gguf.model import write_model
from headway.checkpoints.heads import change_pairing
from headway.checkpoints.hf.config import transformers_verdict
from headway.checkpoints.saving import SHARD_BYTES, TokenizerFiles, check_target, save_state
from headway.choice import Choice
from headway.errors import CheckpointError
from headway.models import ModelSpec, cost
from headway.models.difference import differences
from headway.native.panels import Panels
from headway.positions import rotations
from headway.storage.dtypes import dtype_name
from headway.storage.gguf_blocks import BlockType
from headway.text import Tokenizer

Target = Literal["hf", "gguf"]


@dataclass(frozen=True)
class Change:
    """The model that replaces a folder's, and how to write it.

    spec, state, quantized: as `save_state` takes them; `quantized` cannot be written to a GGUF file.
    choices: decisions that were made, with reasons.
    tokenizer: tokenizer of the new folder; None copies that of the source.
    metadata: additional keys of the header of a folder's weights.
    matrices: block type of the matrices of a GGUF file, as `write_model` takes it; None keeps their dtype.
    packed: block types of the weights in `state` that are rows of blocks already, for a GGUF file.
    """

    spec: ModelSpec
    state: Mapping[str, Tensor]
    quantized: Mapping[str, Panels] = field(default_factory=dict)
    choices: tuple[Choice, ...] = ()
    tokenizer: Tokenizer | TokenizerFiles | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    matrices: BlockType | None = None
    packed: Mapping[str, BlockType] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Measurements of a model, before or after.

    Attributes:
        parameters: number of trained parameters.
        stored_bytes: bytes of all tensors in its files.
        kv_bytes_per_token: bytes of keys and values in all layers for each token, in the dtype that the model runs in.
        kv_bytes_stored: bytes of the caches of one sequence of `Rewritten.context` tokens; 0 for an encoder.
        pairs: number of attention scores of one sequence of that length, in all layers and heads.
        loss: nats per token.
        bits_per_byte: bits per byte of the text.
        perplexity: exp(loss). All three are None without a text.
        positions: the loss by how many tokens preceded a prediction.
    """

    parameters: int
    stored_bytes: int
    kv_bytes_per_token: int
    kv_bytes_stored: int
    pairs: int
    loss: float | None = None
    bits_per_byte: float | None = None
    perplexity: float | None = None
    positions: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest absolute difference of an output on one sequence of `tokens` tokens, and the largest output before.

    probed: number of last positions, whose outputs were compared. marked: whether the first token was global.
    dtype: dtype that both models ran in. bound: largest allowed difference; None if the function may change.
    largest: the largest absolute output of the model before.
    """

    tokens: int
    probed: int
    marked: bool = False
    dtype: str = "float32"
    difference: float
    largest: float
    bound: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the difference is within the bound (a NaN is not)."""
        return self.bound is None or self.difference <= self.bound


class Measured(NamedTuple):
    """Measurements that compare two models.

    differences: differences of outputs on sequences.
    evaluated: evaluations of the two models on a text (`headway.train.evaluation.Evaluation`).
    kl: mean over the text's predictions of the sum over the vocabulary of p ln(p / q), where p is the first model's.
    rounding: largest change of an output caused by storing the numbers in another dtype, both computed in float32; None
        if they are stored unchanged. The differences are then those from the first model with its numbers rounded in
        this way.
    """

    differences: tuple[Difference, ...] = ()
    evaluated: tuple[Any, Any] | None = None
    kl: float | None = None
    rounding: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """A model that was made from another one, and the evidence.

    Attributes:
        changed: what differs (aspect, before, after): the format, aspects of the spec (`differences`), and the dtypes
            or quantization codes of weights.
        transformers: whether transformers reads the new folder, or why not; None for a GGUF file.
        dtype: dtype that the models are run in.
        choices: decisions that were made, with reasons.
        context: tokens of a sequence in all measurements.
        unchanged: longest sequence of which every token attends to what it attended to before.
        tokens: number of predictions that the losses are averaged over.
        kl, rounding: as in `Measured`.
    """

    source: Path
    target: Path
    changed: tuple[tuple[str, str, str], ...]
    transformers: str | None
    dtype: str
    choices: tuple[Choice, ...]
    context: int
    unchanged: int
    before: Measurement
    after: Measurement
    differences: tuple[Difference, ...]
    tokens: int
    kl: float | None
    rounding: float | None


def target_of(path: str | Path) -> Target:
    """Returns the format to write at `path`: GGUF if its name ends in .gguf."""
    return "gguf" if Path(path).suffix == ".gguf" else "hf"


def rewrite(
    folder: Folder,
    target: str | Path,
    change: Change,
    measure: Callable[[Path], Measured],
    *,
    to: Target | None = None,
    context: int,
    unchanged: int = 0,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> Rewritten:
    """Writes the `change` of `folder` at `target`, as a folder or a GGUF file (`to`, by default `target_of`), with its
    generation settings and its tokenizer unless the change has another.

    `measure` is called with the written path before it is renamed to `target`; if it raises, `target` is unchanged.

    Raises CheckpointError, leaving `target` unchanged, if it exists (unless `overwrite`), and for what the format
    cannot hold."""
    check_target(target, overwrite)
    evidence: list[Measured] = []
    spec, state, tokenizer = change.spec, change.state, change.tokenizer
    if tokenizer is None and folder.home is not None:
        tokenizer = TokenizerFiles(folder)

    def publish(path: Path) -> None:
        evidence.append(measure(path))

    if (to or target_of(target)) == "hf":
        save_state(
            target, spec, state, change.quantized, tokenizer=tokenizer, generation=folder.generation, keep_pairing=True,
            shard_bytes=shard_bytes, metadata=change.metadata, overwrite=overwrite, before_publishing=publish,
        )  # fmt: skip
    elif change.quantized or change.metadata:
        raise CheckpointError(
            f"{target}: quantized weights can be written to a folder only; write one, then make a GGUF file of it by "
            "headway convert"
        )
    else:
        if rotations(spec.positions):
            state, spec = change_pairing(state, spec, ARCHITECTURES[architecture_of(spec)].pairing)
        keys = None if tokenizer is None else tokenizer.gguf_metadata(spec.vocab)
        write_model(
            target, spec, state, change.matrices, packed=change.packed, tokenizer=keys, generation=folder.generation,
            check=publish,
        )  # fmt: skip
    (measured,), written, (dtype, _) = evidence, load_folder(target), folder.choose_dtype()
    was, now = measured.evaluated or (None, None)
    stored = [("format", folder.format, written.format), ("weights", folder.weights, written.weights)]
    return Rewritten(
        source=folder.path,
        target=Path(target),
        changed=(*differences(folder.spec, spec), *(row for row in stored if row[1] != row[2])),
        transformers=transformers_verdict(spec) if written.format == "hf" else None,
        dtype=dtype_name(dtype),
        choices=change.choices,
        context=context,
        unchanged=unchanged,
        before=_measurement(folder, was, context, dtype),
        after=_measurement(written, now, context, dtype),
        differences=measured.differences,
        tokens=0 if was is None else was.tokens,
        kl=measured.kl,
        rounding=measured.rounding,
    )


def _measurement(folder: Folder, evaluation: Any, context: int, dtype: torch.dtype) -> Measurement:
    spec = folder.spec
    names = () if evaluation is None else ("loss", "bits_per_byte", "perplexity", "positions")
    return Measurement(
        parameters=cost.parameter_count(spec),
        stored_bytes=folder.stored.nbytes,
        kv_bytes_per_token=cost.kv_bytes_per_token(spec, dtype) if spec.causal else 0,
        kv_bytes_stored=cost.kv_bytes_stored(spec, context, dtype) if spec.causal else 0,
        pairs=cost.attention_pairs(spec, context),
        **{name: getattr(evaluation, name) for name in names},
    )


def probe(spec: ModelSpec, ids: ArrayLike | None, count: int) -> Tensor:
    """Returns one sequence [T] of at most `count` tokens: the first of `ids`, or drawn uniformly if that is None."""
    if ids is None:
        return torch.randint(spec.vocab, (count,), generator=torch.Generator().manual_seed(0))
    return torch.tensor(np.asarray(ids)[:count], dtype=torch.int64)
