"""A folder, an operation, a new folder; and what changed: measured before and after, never assumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from headway.checkpoints import Folder, load_model, save_state
from headway.checkpoints.hf.config import transformers_verdict
from headway.checkpoints.restore import fill
from headway.checkpoints.saving import TokenizerFiles, check_target
from headway.choice import Choice
from headway.errors import DataError
from headway.models import Decoder, ModelSpec, cost
from headway.nn import Adapter, attach
from headway.surgery.text import Text
from headway.train.evaluation import Evaluation

Change = Callable[[ModelSpec, Mapping[str, Tensor]], tuple[ModelSpec, Mapping[str, Tensor]]]
T = TypeVar("T")
LONGEST_ROW = 2048
PROBED = 64


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A model before or after.

    Attributes:
        parameters: trained numbers.
        kv_bytes_per_token: of keys and values in all layers, in the dtype that is stored.
        kv_bytes_stored: what the caches of one row of `Operation.context` tokens hold.
        loss: nats per token. bits_per_byte: of the text. perplexity: exp(loss). None without a text.
    """

    parameters: int
    kv_bytes_per_token: int
    kv_bytes_stored: int
    loss: float | None = None
    bits_per_byte: float | None = None
    perplexity: float | None = None


@dataclass(frozen=True, kw_only=True)
class Position:
    """Nats per token of predictions with `first`..`last` tokens before them, before and after."""

    first: int
    last: int
    tokens: int
    before: float | None
    after: float | None


@dataclass(frozen=True, kw_only=True)
class Written:
    """A folder that was made of another one.

    Attributes:
        changed: fields of the spec that differ, as text: (name, before, after); and how weights are stored, where those
            of the source were quantized, which no operation keeps.
        transformers: whether transformers reads the new folder, and what keeps it from that.
        dtype: that the weights are run in.
    """

    source: Path
    target: Path
    changed: tuple[tuple[str, str, str], ...]
    transformers: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Operation(Written):
    """What was done, and the evidence.

    Attributes:
        choices: what was chosen, with reasons.
        context: tokens of a row in all measurements. tokens: predictions that the losses are means of.
        probe, probed: tokens of the row whose logits were compared, and how many of its last slots; `difference`
            is the largest difference there, `largest_logit` the largest logit before, in absolute value.
        positions: the loss by how far a prediction could look back.
    """

    choices: tuple[Choice, ...]
    context: int
    tokens: int
    before: Measurement
    after: Measurement
    probe: int
    probed: int
    difference: float
    largest_logit: float
    positions: tuple[Position, ...]


def operate(
    folder: Folder,
    target: str | Path,
    change: Change,
    *,
    choices: tuple[Choice, ...] = (),
    text: Text | None = None,
    context: int | None = None,
    beyond: int = 0,
    adapters: Sequence[Adapter] = (),
    tokenizer: TokenizerFiles | None = None,
    overwrite: bool = False,
) -> Operation:
    """Write `folder`, changed, at `target`; tokenizer and generation settings are copied.

    Both models are run in float32, in rows of `context` tokens (`row_length` unless given): the old one as it is
    read, the new one from the folder that was just written, before it takes its name. `beyond` is the number of
    tokens up to which the change has no effect: rows must be longer. `adapters` are on the old model, and `tokenizer`
    is the new one's, where it is not that of `folder`.

    Raises, leaving `target` as it was, CheckpointError when it exists (unless `overwrite`); DataError for a context
    or a text that is too short to show anything; and what `change` raises.
    """
    target = Path(target)
    check_target(target, overwrite)
    spec, state = change(folder.spec, folder.tensors)
    context = row_length(folder.spec, spec, beyond) if context is None else context
    _check_length(text, context, beyond)
    ids = _probe(folder.spec, text, context)
    # What a model refuses is not what it computes: the old one is asked for rows that only the new one takes.
    old = fill(replace(folder.spec, max_context=None), folder.tensors)
    for number, adapter in enumerate(adapters):
        attach(old, adapter, str(number))
    was, logits_before = _measure(old, text, context, ids)
    del old
    written, (now, logits_after) = write(
        folder,
        target,
        spec,
        state,
        lambda path: _measure(load_model(path, dtype=torch.float32), text, context, ids),
        tokenizer=tokenizer,
        overwrite=overwrite,
    )
    dtype = getattr(torch, written.dtype)
    return Operation(
        **vars(written),
        choices=choices,
        context=context,
        tokens=0 if was is None else was.tokens,
        before=_measurement(folder.spec, was, context, dtype),
        after=_measurement(spec, now, context, dtype),
        probe=len(ids),
        probed=logits_before.shape[0],
        difference=float((logits_after - logits_before).abs().max()),
        largest_logit=float(logits_before.abs().max()),
        positions=()
        if was is None or now is None
        else tuple(
            Position(first=a.first, last=a.last, tokens=a.tokens, before=a.loss, after=b.loss)
            for a, b in zip(was.positions, now.positions, strict=True)
        ),
    )


def write(
    folder: Folder,
    target: Path,
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    measure: Callable[[Path], T],
    *,
    context: int | None = None,
    tokenizer: TokenizerFiles | None = None,
    overwrite: bool = False,
) -> tuple[Written, T]:
    """Writes `folder`, changed, at `target`, with its tokenizer (for rows of `context` tokens, where given) and
    generation settings; and what `measure` finds in the new folder before it takes its name."""
    found: list[T] = []
    save_state(
        target,
        spec,
        state,
        tokenizer=TokenizerFiles(folder, context) if tokenizer is None else tokenizer,
        generation=folder.generation,
        keep_pairing=True,
        overwrite=overwrite,
        before_publishing=lambda path: found.append(measure(path)),
    )
    dtype, _ = folder.choose_dtype()
    plain = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in state.values()}))
    stored = () if folder.kinds is None else (("weights", folder.kinds, plain),)
    written = Written(
        source=folder.path,
        target=target,
        changed=(*changes(folder.spec, spec), *stored),
        transformers=transformers_verdict(spec),
        dtype=str(dtype).removeprefix("torch."),
    )
    return written, found[0]


def changes(before: ModelSpec, after: ModelSpec) -> tuple[tuple[str, str, str], ...]:
    """The fields that differ, as text; of patterns, those of the layers that differ."""
    found = []
    for name in (f.name for f in fields(ModelSpec) if f.init):
        old, new = getattr(before, name), getattr(after, name)
        if old == new:
            continue
        if name == "patterns":
            pairs = [(i, a, b) for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
            for a, b in dict.fromkeys((a, b) for _, a, b in pairs):
                at = ", ".join(str(i) for i, x, y in pairs if (x, y) == (a, b))
                found.append((f"pattern of layers {at}", str(a), str(b)))
        else:
            found.append((name, str(old), str(new)))
    return tuple(found)


def row_length(before: ModelSpec, after: ModelSpec, beyond: int = 0) -> int:
    """Tokens of a row to measure in: the longer trained context, at most 2048 or twice `beyond`, and more than it."""
    usual = min(max(before.trained_context, after.trained_context), max(LONGEST_ROW, 2 * beyond))
    wanted = usual if usual > beyond else 2 * beyond
    return min(n for n in (wanted, after.context_limit) if n is not None)


def _check_length(text: Text | None, context: int, beyond: int) -> None:
    if context <= beyond:
        raise DataError(
            f"surgery: rows of {context} tokens cannot show this change, which begins beyond {beyond} tokens; "
            f"measure with a context above {beyond}"
        )
    if text is None:
        return
    longest = text.longest_document
    if longest <= beyond:
        raise DataError(
            f"surgery: {text.file.path}: the longest document has {longest} tokens, and the change begins beyond "
            f"{beyond}: before and after would be equal; give a longer text"
        )


def _probe(spec: ModelSpec, text: Text | None, context: int) -> Tensor:
    """One row [T]: the first of the text, or ids that are drawn evenly from the whole vocabulary."""
    if text is None:
        return torch.randint(spec.vocab, (context,), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(np.asarray(text.file.tokens[:context], dtype=np.int64))


@torch.no_grad()
def _measure(
    model: Decoder, text: Text | None, context: int, ids: Tensor
) -> tuple[Evaluation | None, Tensor]:
    logits: Tensor = model(ids[None], logits_for=slice(-PROBED, None))[0]
    return None if text is None else text.evaluate(model, context), logits


def _measurement(spec: ModelSpec, found: Evaluation | None, context: int, dtype: torch.dtype) -> Measurement:
    return Measurement(
        parameters=cost.parameter_count(spec),
        kv_bytes_per_token=cost.kv_bytes_per_token(spec, dtype),
        kv_bytes_stored=cost.kv_bytes_stored(spec, context, dtype),
        loss=None if found is None else found.loss,
        bits_per_byte=None if found is None else found.bits_per_byte,
        perplexity=None if found is None else found.perplexity,
    )
