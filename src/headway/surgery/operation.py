"""Applies an operation to the model of a folder and writes the result as a new folder, with a report; and held-out
text on which models are measured before and after.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.checkpoints import Folder, build_model, load_folder
from headway.checkpoints.restore import as_decoder
from headway.checkpoints.rewriting import Change, Difference, Measured, Rewritten, probe, rewrite
from headway.checkpoints.saving import check_target
from headway.data import Rows, TokenFile, encode_corpus
from headway.errors import DataError
from headway.models import Decoder, EncoderDecoder, ModelSpec
from headway.text import Tokenizer
from headway.tokens import Tokens
from headway.train.evaluation import Evaluation, evaluate
from headway.train.microbatch_pool import MicrobatchPool


@dataclass(frozen=True)
class Text:
    """Held-out text as tokens of a model; about the first `limit` of them are predicted (all if None)."""

    file: TokenFile
    tokenizer: Tokenizer
    limit: int | None = None

    @staticmethod
    @contextmanager
    def read(
        path: str | Path, folder: Folder, limit: int | None = None, *, framed: bool = True
    ) -> "Iterator[Text]":
        """Opens a .tokens file, or encodes text files with the tokenizer of `folder`, with BOS and EOS around each
        document if `framed`. A context manager: encoded tokens are temporary.

        Raises DataError or CheckpointError if the text or the tokenizer is missing or does not fit."""
        tokenizer = Tokenizer.load(folder.path)
        tokenizer.require_fits(folder.spec.vocab)
        with tempfile.TemporaryDirectory() as scratch:
            encoded = Path(path).suffix == ".tokens"
            tokens = Path(scratch) / "text.tokens"
            file = (
                TokenFile(path) if encoded else encode_corpus(path, tokenizer, tokens, bos=framed, eos=framed)
            )
            file.require_tokenizer(tokenizer.fingerprint)
            yield Text(file, tokenizer, limit)

    def evaluate(self, model: Decoder, context: int) -> Evaluation:
        """Returns the model's loss in rows of `context` tokens, as `headway eval` measures it."""
        with MicrobatchPool(torch.get_num_threads()) as pool:
            return evaluate(model, Rows(self.file, context), limit=self.limit, pool=pool)


LONGEST_ROW = 2048
PROBED = 64


class Row(NamedTuple):
    """Tokens [T] whose outputs are compared, and whether the first of them is global."""

    ids: Tensor
    marked: bool = False


def operate(
    folder: Folder,
    target: str | Path,
    change: Change,
    *,
    text: Text | None = None,
    context: int | None = None,
    beyond: int = 0,
    rows: Sequence[Row] | None = None,
    overwrite: bool = False,
) -> Rewritten:
    """Writes `folder` to `target` with the spec and weights of `change`, as `rewrite` does, and measures both models.

    Both models run in float32, in rows of `context` tokens (`row_length` if None): the old one as read, the new one
    from the folder just written, before it is renamed to `target`. The change has no effect up to `beyond` tokens, so
    rows must be longer. Outputs are compared on `rows`; if None, on one row from the beginning of the text, or of
    random tokens.

    Raises CheckpointError if `target` exists (unless `overwrite`), and DataError for a context or a text that is too
    short to show a difference; `target` is then left unchanged.
    """
    check_target(target, overwrite)
    context = row_length(folder.spec, change.spec, beyond) if context is None else context
    if rows is None:
        _check_length(text, context, beyond)
        rows = [Row(probe(folder.spec, None if text is None else text.file.tokens, context))]
    # The rows may be longer than the old model's limit, so it is built without one.
    old, before = _seen(replace(folder, spec=replace(folder.spec, max_context=None)), text, context, rows)

    def measure(path: Path) -> Measured:
        new, after = _seen(load_folder(path), text, context, rows)
        differences = (
            Difference(
                tokens=len(row.ids),
                probed=len(a),
                marked=row.marked,
                difference=float((b - a).abs().max()),
                largest=float(a.abs().max()),
            )
            for row, a, b in zip(rows, before, after, strict=True)
        )
        return Measured(tuple(differences), None if old is None or new is None else (old, new))

    return rewrite(folder, target, change, measure, context=context, unchanged=beyond, overwrite=overwrite)


def row_length(before: ModelSpec, after: ModelSpec, beyond: int = 0) -> int:
    """Returns the row length to measure with: the longer trained context, at most 2048 or twice `beyond`, and above
    `beyond`; never above the new model's limit."""
    usual = min(max(before.trained_context, after.trained_context), max(LONGEST_ROW, 2 * beyond))
    length = usual if usual > beyond else 2 * beyond
    return min(n for n in (length, after.context_limit) if n is not None)


def _check_length(text: Text | None, context: int, beyond: int) -> None:
    """Raises DataError unless rows, and the longest document, have more than `beyond` tokens."""
    if context <= beyond:
        raise DataError(
            f"surgery: rows of {context} tokens cannot show this change, which begins beyond {beyond} tokens; "
            f"measure with a context above {beyond}"
        )
    if text is None:
        return
    longest = int(np.diff(np.asarray(text.file.ends, dtype=np.int64), prepend=0).max())
    if longest <= beyond:
        raise DataError(
            f"surgery: {text.file.path}: the longest document has {longest} tokens, and the change begins beyond "
            f"{beyond}: before and after would be equal; give a longer text"
        )


@torch.no_grad()
def _seen(
    folder: Folder, text: Text | None, context: int, rows: Sequence[Row]
) -> tuple[Evaluation | None, list[Tensor]]:
    """Returns the loss on the text, and the outputs of the head for each row, of a decoder only for its last tokens. An
    encoder-decoder reads the row as source and as target."""
    model = build_model(folder, dtype=torch.float32, dequantize=True)
    outputs: list[Tensor] = []
    for ids, marked in rows:
        if isinstance(model, Decoder | EncoderDecoder):
            inputs = [ids[None]] * (2 if isinstance(model, EncoderDecoder) else 1)
            outputs.append(model(*inputs, logits_for=slice(-PROBED, None))[0])
        else:
            tokens = Tokens.range(len(ids))
            outputs.append(model(ids[None], tokens=tokens.with_global([0]) if marked else tokens)[0])
    return None if text is None else text.evaluate(as_decoder(model), context), outputs
