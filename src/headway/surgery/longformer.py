"""Turns an encoder of short rows into a long one: windows, global tokens, and its position table copied end to end
(Beltagy et al. 2020, section 5).

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
    """Returns the encoder for rows of N = `context` tokens, with windows and global tokens in every layer.

        positions   row p of the new table is row p mod S of the old one
        patterns    Window.around(w / 2) | Global()
        q', k', v'  the projections of global tokens start as copies of q, k, v

    Rows of up to w / 2 + 1 tokens see the same tokens as before, so their outputs do not change, whichever tokens are
    global. With random projections instead of copies the model would lose what it has learned; with copies it still
    has to learn the positions beyond S (in the paper: 65 000 steps of masked language modelling).

    A table without a padding row (BERT's) gets one, of zeros, which no token reads: then transformers has a class for
    the result (`Learned.offset`). Position schemes without a table (rotary, relative) are left unchanged.

    Args:
        context: N, at least S.
        window: w, even, as in transformers' attention_window: w / 2 keys on either side; or one per layer.
    Raises:
        ConfigError: a model that is no encoder, has linear attention, or has projections for global tokens already; a
            context below S; a window that is odd or below 2, or a list whose length is not the number of layers.
    """
    if spec.causal or len(spec.softmax_layers) < spec.layers or spec.global_projections:
        what = "is a decoder" if spec.causal else f"has layers of {state_kinds(spec)}"
        what = "has projections for global tokens already" if spec.global_projections else what
        raise ConfigError(
            f"make_longformer needs an encoder with full attention, but this {spec.family} {what}"
        )
    windows = [window] * spec.layers if isinstance(window, int) else list(window)
    if len(windows) != spec.layers:
        raise ConfigError(
            f"make_longformer: {len(windows)} windows for {spec.layers} layers; give one, or one for each"
        )
    patterns = tuple(from_foreign("attention_window", w) | Global() for w in windows)
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
    """Writes `folder` as changed by `make_longformer`, and compares the outputs of both models on short rows.

    The rows are the first tokens of `text`, encoded by the folder's tokenizer, or drawn uniformly from the vocab. Both
    models run in float32, the new one from the folder just written, before it is renamed to `target`. The tokenizer is
    copied; its `model_max_length` becomes `context`.

    Raises CheckpointError if `target` exists (unless `overwrite`), DataError for a text without tokens, and as
    `make_longformer` does; `target` is then left unchanged.
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
        raise DataError("surgery longformer: the text has no tokens; give a longer one, or none")
    return ids
