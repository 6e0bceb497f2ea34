"""An encoder of short rows made long: windows, global tokens, and its table of positions copied end to end.
(Beltagy et al. 2020, section 5.)

Legend: M width, S positions before, N positions after, w window.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from headway.checkpoints import Folder
from headway.checkpoints.hf.windows import from_foreign
from headway.checkpoints.rewriting import Change, Rewritten, probe
from headway.checkpoints.saving import TokenizerFiles
from headway.errors import ConfigError, DataError
from headway.models import ModelSpec
from headway.models.mixers import state_kinds
from headway.patterns import Global
from headway.positions import Learned
from headway.surgery.operation import Row, operate
from headway.text import Tokenizer

TABLE = "model.embed_positions.weight"
_LOCAL = re.compile(r"(?<=\.self_attn)\.([qkv])_proj\.")


def make_longformer(
    spec: ModelSpec, state: Mapping[str, Tensor], context: int, window: int | Sequence[int] = 512
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The encoder for rows of N = `context` tokens, with windows and global tokens in every layer.

        positions   row p of the new table is row p mod S of the old one
        patterns    Window.around(w / 2) | Global()
        q', k', v'  the projections of global tokens begin as copies of q, k, v

    Rows of up to w / 2 + 1 tokens see what they saw, so what is computed of them does not change, whichever of them are
    global. Without the copies, at random, the model would lose what it knows; with them it still has to learn the
    positions beyond S (the paper: 65 000 steps of masked language modelling).

    A table without a row for padding (BERT's) is given one, of zeros, which no token reads: then transformers has a
    class for the result (`Learned.offset`). Schemes without a table (rotary, relative) are left as they are.

    Args:
        context: N, at least S.
        window: w, even, as in transformers' attention_window: w / 2 others on either side; or one for each layer.
    Raises:
        ConfigError: no encoder; one with linear attention, or with projections for global tokens already; a context
        below S; a window that is odd or below 2, or a list of another length than there are layers.
    """
    if spec.causal or len(spec.softmax_layers) < spec.layers or spec.global_projections:
        what = "is a decoder" if spec.causal else f"has layers of {state_kinds(spec)}"
        what = "has projections for global tokens already" if spec.global_projections else what
        raise ConfigError(
            f"make_longformer: an encoder with full attention is needed, and this {spec.family} {what}"
        )
    each = [window] * spec.layers if isinstance(window, int) else list(window)
    if len(each) != spec.layers:
        raise ConfigError(
            f"make_longformer: {len(each)} windows for {spec.layers} layers; give one, or one for each"
        )
    patterns = tuple(from_foreign("attention_window", w) | Global() for w in each)
    positions, family, pooled_dropout = spec.positions, spec.family, spec.pooled_dropout
    known = positions.size if isinstance(positions, Learned) else spec.trained_context
    if isinstance(context, bool) or not isinstance(context, int) or context < known:
        raise ConfigError(
            f"make_longformer: the model takes rows of {known} tokens, so context must be at least that, got "
            f"{context!r}"
        )
    changed = dict(state)
    for name, value in state.items():
        if _LOCAL.search(name):
            changed[_LOCAL.sub(r".\1_global_proj.", name)] = value.clone()
    if isinstance(positions, Learned):
        family, table, pooled_dropout = "longformer", state[TABLE], True
        unread, old = table[: positions.offset], table[positions.offset :]
        unread = unread if len(unread) else torch.zeros_like(old[:1])
        changed[TABLE] = torch.cat((unread, old[torch.arange(context) % known]))
        positions = Learned(context, offset=len(unread))
    limit = None if spec.max_context is None else max(spec.max_context, context)
    new = replace(
        spec,
        family=family,
        positions=positions,
        patterns=patterns,
        global_projections=True,
        pooled_dropout=pooled_dropout,
        trained_context=context,
        max_context=limit,
    )
    return new, changed


def lengthen(
    folder: Folder,
    target: str | Path,
    context: int,
    window: int | Sequence[int] = 512,
    *,
    text: str | None = None,
    overwrite: bool = False,
) -> Rewritten:
    """Write `folder` as `make_longformer` changes it; compare what both compute of short rows.

    The rows are the first tokens of `text`, by the folder's tokenizer, or drawn evenly from the vocabulary. Both
    models run in float32, the new one from the folder that was just written, before it takes its name. The tokenizer
    is copied; a `model_max_length` in it becomes `context`.

    Raises, leaving `target` as it was, CheckpointError when it exists (unless `overwrite`), and as `make_longformer`
    does.
    """
    spec, state = make_longformer(folder.spec, folder.tensors, context, window)
    known = folder.spec.context_limit or folder.spec.trained_context
    unchanged = min((window if isinstance(window, int) else min(window)) // 2 + 1, known)
    row = probe(folder.spec, None if text is None else _encoded(folder, text), known)
    short = row[:unchanged]
    rows = [Row(short), Row(short, True), Row(row)][: 3 if unchanged < len(row) else 2]
    change = Change(spec, state, tokenizer=TokenizerFiles(folder, context))
    return operate(folder, target, change, context=context, beyond=unchanged, rows=rows, overwrite=overwrite)


def _encoded(folder: Folder, text: str) -> list[int]:
    tokenizer = Tokenizer.load(folder.path)
    tokenizer.require_fits(folder.spec.vocab)
    ids = tokenizer.encode(text)
    if not ids:
        raise DataError("surgery longformer: the text has no tokens; give one that has, or none at all")
    return ids
