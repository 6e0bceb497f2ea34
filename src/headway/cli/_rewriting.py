"""Options and report that the commands that rewrite a model folder share."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli._options import Model
from headway.cli._shared import set_threads
from headway.errors import ConfigError
from headway.report import cell, size, table

if TYPE_CHECKING:
    from headway.checkpoints import Folder
    from headway.checkpoints.rewriting import Difference, Rewritten
    from headway.surgery import Text


@dataclass(frozen=True)
class Run:
    """The model and the output.

    out: folder to write, or GGUF file (.gguf)
    """

    model: Model
    out: Path
    _: KW_ONLY
    allow_pickle: bool = False
    overwrite: bool = False
    json: bool = False
    threads: int | None = None

    def open(self) -> "Folder":
        """Returns the model's folder. Raises CheckpointError also if the target exists and may not be replaced."""
        from headway.checkpoints import load_folder
        from headway.checkpoints.saving import check_target

        set_threads(self.threads)
        check_target(self.out, self.overwrite)
        return load_folder(self.model, allow_pickle=self.allow_pickle)


@dataclass(frozen=True, kw_only=True)
class MeasuredRun(Run):
    """The model, the output, and a text to measure both models on.

    data: held-out text to measure on: a file, a folder of text files, or a .tokens file
    """

    data: Path | None = None
    context: int | None = None
    limit: int | None = None

    def text(self, folder: "Folder") -> "AbstractContextManager[Text | None]":
        """Returns the text to measure on as a context manager, which yields None if there is none."""
        from headway.surgery import Text

        if self.data is None and self.limit is not None:
            raise ConfigError("--limit counts tokens of the text of --data; give --data too")
        return nullcontext() if self.data is None else Text.read(self.data, folder, self.limit)


def to_text(done: "Rewritten") -> str:
    """Returns the report for a terminal; caches are left out for an encoder, and losses without a text."""
    was, now = done.before, done.after
    causal, checked = was.kv_bytes_stored > 0, any(diff.bound is not None for diff in done.differences)
    reader = "" if done.transformers is None else f"; transformers {done.transformers}"
    lines = [f"{done.source} -> {done.target}{reader}"]
    lines += [f"  {name}: {a} -> {b}" for name, a, b in done.changed] or ["  the spec stays as it was"]
    for choice in done.choices:
        rejected = [f"    not {name}: {why}" for name, why in choice.rejected]
        lines += [f"  {choice.what}: {choice.why}", *rejected]
    rows: list[tuple[object, ...]] = [("parameters", was.parameters, now.parameters)]
    if was.stored_bytes != now.stored_bytes:
        rows.append(("bytes", size(was.stored_bytes), size(now.stored_bytes)))
    if causal:
        rows += [
            (f"KV per token ({done.dtype})", size(was.kv_bytes_per_token), size(now.kv_bytes_per_token)),
            (f"KV of a row of {done.context}", size(was.kv_bytes_stored), size(now.kv_bytes_stored)),
        ]
    else:
        rows.append((f"scores of a row of {done.context}", was.pairs, now.pairs))
    names = {"loss": "nats per token", "bits_per_byte": "bits per byte", "perplexity": "perplexity"}
    losses = ((words, getattr(was, name), getattr(now, name)) for name, words in names.items())
    rows += [row for row in losses if row[1] is not None]
    lines += ["", table(("what", "before", "after"), rows), ""]
    if done.unchanged and not causal:
        lines.append(f"  rows of up to {done.unchanged} tokens see what they saw")
    article, what = ("a", "logit") if causal else ("an", "output")
    lines += [
        f"  largest difference of {article} {what}: {cell(diff.difference)} ({_allowed(diff)}largest {what} "
        f"{cell(diff.largest)}), in the last {diff.probed} of {diff.tokens} tokens"
        f"{', the first of them global' * diff.marked}"
        for diff in done.differences
    ]
    if done.rounding is not None:
        largest = cell(done.differences[0].largest)
        lines.append(
            f"  differs from the source: rounding changed logits by up to {cell(done.rounding)} of {largest}"
        )
    elif checked:
        lines.append("  equal")
    if done.kl is not None:
        lines.append(f"  mean KL to the model as it was: {cell(done.kl)} nats, over {done.tokens} tokens")
    if was.positions:
        columns = ("tokens to look back on", "predictions", "perplexity before", "after")
        pairs = zip(was.positions, now.positions, strict=True)
        ranges = [(f"{a.first}-{a.last}", a.tokens, _exp(a.loss), _exp(b.loss)) for a, b in pairs]
        lines += ["", table(columns, ranges)]
    elif causal and not checked and not done.tokens:
        lines.append("  no loss was measured: --data FILE gives held-out text to measure it on")
    return "\n".join(lines)


def _allowed(diff: "Difference") -> str:
    return "" if diff.bound is None else f"in {diff.dtype}; allowed {cell(diff.bound)}, "


def _exp(loss: float | None) -> float | None:
    return None if loss is None else math.exp(min(loss, 700.0))
