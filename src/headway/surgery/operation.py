"""A folder, what an operation made of its model, a new folder, with a report."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from headway.checkpoints import Folder, load_folder
from headway.checkpoints.restore import as_decoder, build_model, restore
from headway.checkpoints.saving import TokenizerFiles, check_target
from headway.choice import Choice
from headway.errors import DataError
from headway.models import Decoder, Model, ModelSpec
from headway.nn import Adapter, attach
from headway.surgery.rewrite import Difference, Measured, Rewritten, probe, rewrite, row_length
from headway.surgery.text import Text
from headway.tokens import Tokens
from headway.train.evaluation import Evaluation

PROBED = 64


class Row(NamedTuple):
    """Tokens [T] of which outputs are compared, and whether the first of them is global."""

    ids: Tensor
    marked: bool = False


def operate(
    folder: Folder,
    target: str | Path,
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    *,
    choices: tuple[Choice, ...] = (),
    text: Text | None = None,
    context: int | None = None,
    beyond: int = 0,
    rows: Sequence[Row] | None = None,
    adapters: Sequence[Adapter] = (),
    tokenizer: TokenizerFiles | None = None,
    overwrite: bool = False,
) -> Rewritten:
    """Write `folder` at `target` with the spec and the weights that an operation has made of its own; tokenizer and
    generation settings are copied.

    Both models are run in float32, in rows of `context` tokens (`row_length` unless given): the old one as it is
    read, the new one from the folder that was just written, before it takes its name. `beyond` is the number of
    tokens up to which the change has no effect: rows must be longer. Outputs are compared on `rows`; unless given, on
    one of the beginning of the text, or drawn. `adapters` are on the old model, and `tokenizer` is the new one's, where
    it is not that of `folder`.

    Raises, leaving `target` as it was, CheckpointError when it exists (unless `overwrite`); DataError for a context
    or a text that is too short to show anything.
    """
    check_target(target, overwrite)
    context = row_length(folder.spec, spec, beyond) if context is None else context
    if rows is None:
        _check_length(text, context, beyond)
        rows = [Row(probe(folder.spec, None if text is None else text.file.tokens, context))]
    # What a model refuses is not what it computes: the old one is asked for rows that only the new one takes.
    old = restore(replace(folder.spec, max_context=None), folder.tensors)
    for number, adapter in enumerate(adapters):
        attach(old, adapter, str(number))
    was, before = _seen(old, text, context, rows)
    del old

    def measure(path: Path) -> Measured:
        now, after = _seen(build_model(load_folder(path), dtype=torch.float32), text, context, rows)
        found = (
            Difference(
                tokens=len(row.ids),
                probed=len(a),
                marked=row.marked,
                difference=float((b - a).abs().max()),
                largest=float(a.abs().max()),
            )
            for row, a, b in zip(rows, before, after, strict=True)
        )
        return Measured(tuple(found), None if was is None or now is None else (was, now))

    return rewrite(
        folder, target, spec, state, measure, context=context, unchanged=beyond, choices=choices, tokenizer=tokenizer,
        overwrite=overwrite,
    )  # fmt: skip


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


@torch.no_grad()
def _seen(
    model: Model, text: Text | None, context: int, rows: Sequence[Row]
) -> tuple[Evaluation | None, list[Tensor]]:
    """The loss on the text, and what the head gives of each row: a decoder, of its last tokens."""
    outputs: list[Tensor] = []
    for ids, marked in rows:
        if isinstance(model, Decoder):
            outputs.append(model(ids[None], logits_for=slice(-PROBED, None))[0])
        else:
            tokens = Tokens.range(len(ids))
            outputs.append(model(ids[None], tokens=tokens.with_global([0]) if marked else tokens)[0])
    return None if text is None else text.evaluate(as_decoder(model), context), outputs
