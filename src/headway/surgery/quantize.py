"""Writes a folder with weights of 8 or 4 bits, and measures what that costs on a text, from the folder just written."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headway.checkpoints import Folder, build_model, load_folder
from headway.checkpoints.bases import QUANTIZED_FROM, fingerprint
from headway.checkpoints.quantized.layers import quantized_state
from headway.checkpoints.restore import as_decoder
from headway.checkpoints.rewriting import Change, Measured, Rewritten, rewrite, target_of
from headway.checkpoints.saving import check_target
from headway.choice import Choice
from headway.data import Rows
from headway.errors import ConfigError
from headway.models import Decoder
from headway.models.quantize import quantize_model, quantized_layers
from headway.nn import IGNORE_INDEX
from headway.surgery.operation import Text, row_length
from headway.train.evaluation import Evaluation

CALIBRATION_TOKENS = 1 << 16
"""Number of tokens that are read from the beginning of a calibration text."""
BATCH_TOKENS = 1024


def quantize_folder(
    folder: Folder,
    target: str | Path,
    weights: str,
    *,
    group: int | None = None,
    output: bool = False,
    calibrate: Text | None = None,
    text: Text | None = None,
    context: int | None = None,
    overwrite: bool = False,
) -> Rewritten:
    """Writes `folder` with quantized weights to `target`; options are those of
    `headway.models.quantize.quantize_model`.

    `calibrate` and `text` are read in rows of `context` tokens (`row_length` if None); both models run in the dtype
    that the folder is read in. Raises CheckpointError if `target` exists (unless `overwrite`), and ConfigError for a
    folder that is quantized already, for a GGUF target and as `quantize_model` does; `target` is then left unchanged.
    """
    check_target(target, overwrite)
    if target_of(target) == "gguf":
        raise ConfigError(
            f"{target}: quantized weights are written into a folder, not a GGUF file; convert it with headway convert"
        )
    if folder.quantized:
        raise ConfigError(
            f"{folder.path} has weights of {folder.weights} already; quantize the original model, or first dequantize "
            "this one with headway convert"
        )
    context = row_length(folder.spec, folder.spec) if context is None else context
    model, rows = build_model(folder), None if calibrate is None else _rows(calibrate, context)
    quantize_model(model, weights, group=group, output=output, calibrate=rows)
    codes = "are the nearest" if rows is None else f"by GPTQ on {sum(map(len, rows))} tokens"

    def measure(path: Path) -> Measured:
        if text is None:
            return Measured()
        plain, rounded = (as_decoder(build_model(source)) for source in (folder, load_folder(path)))
        return compare(plain, rounded, text, context)

    state, quantized = quantized_state(model)
    choice = Choice(f"{len(quantized_layers(model))} layers", f"codes {codes}")
    change = Change(
        model.spec, state, quantized, choices=(choice,), metadata={QUANTIZED_FROM: fingerprint(folder)}
    )
    return rewrite(folder, target, change, measure, context=context, overwrite=overwrite)


@torch.no_grad()
def compare(before: Decoder, after: Decoder, text: Text, context: int) -> Measured:
    """Returns the losses of both models, and the KL divergence of `after` from `before` per token, on the
    predictions of a text in rows of `context` tokens."""
    rows = Rows(text.file, context)
    count = len(rows) if text.limit is None else min(len(rows), max(1, -(-text.limit // context)))
    batch_rows, tokens, sums = max(1, BATCH_TOKENS // context), 0, torch.zeros(3, dtype=torch.float64)
    for start in range(0, count, batch_rows):
        inputs, targets = rows.batch(range(start, min(start + batch_rows, count)))
        predicted = targets != IGNORE_INDEX
        p, q = (model(**inputs, logits_for=predicted).float().log_softmax(-1) for model in (before, after))
        at = targets[predicted].unsqueeze(1)
        nats = [-float(x.gather(1, at).double().sum()) for x in (p, q)]
        sums += torch.tensor([*nats, float((p.exp() * (p - q)).sum(1).double().sum())], dtype=torch.float64)
        tokens += len(at)
    loss_before, loss_after, kl = sums.tolist()
    return Measured(
        (), (Evaluation(loss_before, tokens), Evaluation(loss_after, tokens)), kl / max(tokens, 1)
    )


def _rows(text: Text, context: int) -> list[Tensor]:
    """Returns the beginning of a text as rows of ids."""
    ids = torch.from_numpy(np.asarray(text.file.tokens[:CALIBRATION_TOKENS], dtype=np.int64))
    return list(ids.split(context))
