"""What the commands of `headway surgery` share: arguments and options, measuring, reports. Imports nothing heavy."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli._shared import (
    AllowPickleOption,
    FolderArgument,
    JsonOption,
    LimitOption,
    OverwriteOption,
    RowOption,
    TargetArgument,
    ThreadsOption,
    note,
    print_report,
    set_threads,
)
from headway.report import cell, plain, size, table

if TYPE_CHECKING:
    from headway.checkpoints import Folder
    from headway.choice import Choice
    from headway.surgery import Lengthened, Operation, Pooled, Text
    from headway.surgery.operation import Change


@dataclass(frozen=True, kw_only=True)
class Run:
    """The arguments and options of every operation."""

    model: FolderArgument
    out: TargetArgument
    allow_pickle: AllowPickleOption = False
    overwrite: OverwriteOption = False
    json: JsonOption = False
    threads: ThreadsOption = None

    def open(self) -> "Folder":
        """The model's folder. Raises CheckpointError when something is at the target, too, and may not be replaced."""
        from headway.checkpoints import load_folder
        from headway.checkpoints.folder import check_target

        set_threads(self.threads)
        check_target(self.out, self.overwrite)
        return load_folder(self.model, allow_pickle=self.allow_pickle)


@dataclass(frozen=True, kw_only=True)
class MeasuredRun(Run):
    """With those of operations that are measured on a text."""

    text: Annotated[
        Path | None,
        typer.Option(
            "--text", help="held-out text to measure on: a file, a folder of text files, a .tokens file"
        ),
    ] = None
    context: RowOption = None
    limit: LimitOption = None

    def operate(
        self,
        folder: "Folder",
        change: "Change",
        choice: "Choice",
        *,
        beyond: int = 0,
        compare: "Callable[[Text], tuple[Pooled, ...]] | None" = None,
    ) -> None:
        """Operate, and print the report; `compare` is what is compared on the text beforehand."""
        from headway.errors import ConfigError
        from headway.surgery import Text, operate, verdict

        if self.text is None and self.limit is not None:
            raise ConfigError("surgery: --limit counts tokens of a text; give one with --text")
        with nullcontext() if self.text is None else Text.read(self.text, folder, self.limit) as words:
            rows = () if words is None or compare is None else compare(words)
            note(f"reading {folder.path}, measuring before and after")
            done = operate(
                folder, self.out, change, choices=(choice,), text=words, context=self.context, beyond=beyond,
                overwrite=self.overwrite,
            )  # fmt: skip
        order, report = verdict(rows) if rows else None, operation_text(done)
        if rows:
            columns = ("pool", "seed", "nats per token", "bits per byte")
            cells = table(columns, [(r.pool, r.seed, r.loss, r.bits_per_byte) for r in rows])
            report += f"\n\n  right after, without training:\n{cells}\n  {order}"
        print_report({**plain(done), "pools": rows, "verdict": order}, report, self.json)


def operation_text(done: "Operation") -> str:
    """The report for a terminal."""
    was, now = done.before, done.after
    lines = [f"{done.source} -> {done.target}; transformers {done.transformers}"]
    lines += [f"  {name}: {a} -> {b}" for name, a, b in done.changed] or ["  the spec stays as it was"]
    for choice in done.choices:
        lines += [
            f"  {choice.what}: {choice.why}",
            *(f"    not {name}: {why}" for name, why in choice.rejected),
        ]
    rows: list[tuple[object, ...]] = [
        ("parameters", was.parameters, now.parameters),
        (f"KV per token ({done.dtype})", size(was.kv_bytes_per_token), size(now.kv_bytes_per_token)),
        (f"KV of a row of {done.context}", size(was.kv_bytes_stored), size(now.kv_bytes_stored)),
    ]
    if was.loss is not None:
        rows += [
            ("nats per token", was.loss, now.loss),
            ("bits per byte", was.bits_per_byte, now.bits_per_byte),
            ("perplexity", was.perplexity, now.perplexity),
        ]
    lines += ["", table(("what", "before", "after"), rows), ""]
    lines.append(
        f"  largest difference of a logit: {cell(done.difference)} (largest logit {cell(done.largest_logit)}), "
        f"in the last {done.probed} of {done.probe} tokens"
    )
    if done.positions:
        columns = ("tokens to look back on", "predictions", "perplexity before", "after")
        ranges = [(f"{p.first}-{p.last}", p.tokens, _exp(p.before), _exp(p.after)) for p in done.positions]
        lines += ["", table(columns, ranges)]
    else:
        lines.append("  no loss was measured: --text FILE gives held-out text to measure it on")
    return "\n".join(lines)


def _exp(loss: float | None) -> float | None:
    return None if loss is None else math.exp(min(loss, 700.0))


def lengthened_text(done: "Lengthened") -> str:
    """The report for a terminal."""
    lines = [f"{done.source} -> {done.target}; transformers {done.transformers}"]
    lines += [f"  {name}: {a} -> {b}" for name, a, b in done.changed]
    every, seen = done.pairs
    cells = [
        (d.tokens, "the first" if d.marked else "none", d.difference, d.largest) for d in done.differences
    ]
    sizes = [("parameters", *done.parameters), ("longest row", *done.context)]
    return "\n".join(
        [
            *lines,
            "",
            table(("what", "before", "after"), sizes),
            "",
            f"  scores of a row of {done.context[1]}: {seen}, {seen / every:.1%} of the {every} if all saw all",
            f"  rows of up to {done.unchanged} tokens see what they saw; largest difference of an output:",
            table(("tokens", "global", "difference", "largest output"), cells),
        ]
    )
