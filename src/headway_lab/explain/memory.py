"""Why attention eats memory: what a training step keeps, by cause, predicted and measured.

(Beltagy et al. 2020, section 1, for the claim; the causes are counted in `headway.models.cost.activation_bytes`.)
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.attention import BACKENDS
from headway.models import Model, ModelSpec, build, cost
from headway.patterns import Causal, Pattern, Window
from headway_lab.explain.report import Figure, Report, Row, Rows, label_axes, label_ticks, panels
from headway_lab.profiling import one_thread, saved_bytes

LENGTHS = (512, 1024, 2048)
WINDOW, SEED = 128, 0
CLOSE = 0.02
FIELDS = {"vocab": 64, "width": 64, "layers": 2, "heads": 4, "kv_heads": 4, "hidden": 128}
KINDS: tuple[tuple[str, Pattern, str], ...] = (
    ("n x n stored", Causal(), "dense"),
    ("recomputed", Causal(), "sdpa"),
    ("window", Window.last(WINDOW), "banded"),
)

FORMULA = """kept for the backward, in float32, per row of n tokens, L layers of width M, H heads of D, F, V:
scores         L n^2 (8 H + 1)     exp(scores) and weights of every head, and the mask: n x n, once per head
attention      4 L n (4 H D + H)   q, k, v, the output, and the logsumexp from which scores are recomputed
norms          4 n (2 L + 1) (3 M + 1)        feed-forward   16 L n F        logits   4 n V
four times the length: 16 times the scores, 4 times everything else; parameters and their gradients stay
a window leaves n (w + 1) - w (w + 1) / 2 of the n (n + 1) / 2 pairs of a head, w = keys seen before a token"""


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors, made while it is active, that were alive at once (memory inside of one
    operation is not seen)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            storage = t.untyped_storage() if isinstance(t, Tensor) else None
            if storage is not None and storage._cdata not in given:
                self._live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self._live = {at: kept for at, kept in self._live.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out


def run() -> Report:
    """One training step at each length and kind: predicted, kept, and live at the worst moment."""
    with one_thread():
        return judge([measure(*kind, n) for kind in KINDS for n in LENGTHS], parameter_bytes())


def spec_of(pattern: Pattern) -> ModelSpec:
    """The model of one kind."""
    return ModelSpec.of("llama", patterns=pattern, **FIELDS)


def parameter_bytes() -> set[int]:
    """Of the models of all kinds: one number."""
    return {cost.weight_bytes(spec_of(pattern), torch.float32) for _, pattern, _ in KINDS}


def predicted(pattern: Pattern, backend: str, length: int) -> dict[str, int]:
    """Bytes kept, by cause."""
    stored = BACKENDS[backend].capabilities.stores_scores
    by_cause = cost.activation_bytes(
        spec_of(pattern), length, scores="stored" if stored else "recomputed", loss="logits"
    )
    return {
        **{f"{name} (B)": by_cause[name] for name in ("scores", "attention", "norms")},
        "ffn (B)": by_cause["feed-forward"],
        "logits (B)": by_cause["logits"],
        "predicted (B)": sum(by_cause.values()),
    }


def measure(kind: str, pattern: Pattern, backend: str, length: int) -> Row:
    """One step of a fresh model on one random row, in bytes: predicted by cause, kept by autograd, and live at the
    worst moment."""
    spec = spec_of(pattern)
    model = build(spec, dtype=torch.float32, seed=SEED, backend=backend)
    ids = torch.randint(spec.vocab, (1, length), generator=torch.Generator().manual_seed(SEED))
    _, kept = saved_bytes(lambda: loss(model, ids), model)
    with LiveBytes() as live:
        loss(model, ids).backward()
    return {
        "kind": kind,
        "n": length,
        "pairs": cost.attention_pairs(spec, length),
        **predicted(pattern, backend, length),
        "kept (B)": kept,
        "peak (B)": live.peak,
    }


def loss(model: Model, ids: Tensor) -> Tensor:
    """The mean of -log p of every token (its own id as target: only memory matters here)."""
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def judge(rows: Rows, parameters: set[int]) -> Report:
    """The verdict: predicted is kept; scores grow 16-fold, the rest 4-fold; recomputing removes the scores."""
    short, long = LENGTHS[0], LENGTHS[-1]
    at = {(row["kind"], row["n"]): row for row in rows}
    before, after = at["n x n stored", short], at["n x n stored", long]
    growth = after["scores (B)"] / before["scores (B)"]
    # Of all that is not n x n.
    rest = (after["predicted (B)"] - after["scores (B)"]) / (before["predicted (B)"] - before["scores (B)"])
    error = max(abs(row["kept (B)"] / (row["predicted (B)"] + copied(row)) - 1) for row in rows)
    peaks = {kind: at[kind, long]["peak (B)"] / at[kind, short]["peak (B)"] for kind, _, _ in KINDS}
    right = growth == 16 and rest == 4 and error < CLOSE and len(parameters) == 1
    return Report(
        rows=tuple(rows),
        seen=right and peaks["n x n stored"] > 12 and max(peaks["recomputed"], peaks["window"]) < 5,
        setting=(
            f"one row, {FIELDS['layers']} layers of width {FIELDS['width']}, {FIELDS['heads']} heads, feed-forward "
            f"{FIELDS['hidden']}, vocab {FIELDS['vocab']}, window {WINDOW}, float32, seed {SEED}"
        ),
        finding=(
            f"autograd keeps what the formula says within {100 * error:.1f} %; from {short} to {long} tokens the "
            f"stored scores grow {growth:.0f}-fold and the other activations {rest:.0f}-fold, so that at {long} "
            f"scores are {100 * after['scores (B)'] / after['predicted (B)']:.0f} % of what is kept; the measured peak "
            f"grows {peaks['n x n stored']:.1f}-fold where scores are stored, {peaks['recomputed']:.1f}-fold where "
            f"they are recomputed and {peaks['window']:.1f}-fold with a window; what the window spares is work (it "
            f"leaves {at['window', long]['pairs'] / after['pairs']:.2g} of the pairs), not parameters "
            f"({max(parameters):,} bytes)"
        ),
    )


def copied(row: Row) -> int:
    """Bytes that the kernel keeps beyond the formula: the banded one hands its output over in another layout and so
    keeps it twice, 4 H D bytes a token more."""
    return row["n"] * 4 * FIELDS["width"] * FIELDS["layers"] if row["kind"] == "window" else 0


def draw(figure: Figure, report: Report) -> None:
    """Left: what is kept at the longest row, by cause. Right: the measured peak against the length."""
    left, right = panels(figure, 9, 3.8)
    last = [row for row in report.rows if row["n"] == LENGTHS[-1]]
    below = np.zeros(len(last))
    for name in ("norms", "ffn", "logits", "attention", "scores"):
        sizes = np.array([row[f"{name} (B)"] / 2**20 for row in last])
        left.bar([row["kind"] for row in last], sizes, bottom=below, label=name)
        below += sizes
    label_axes(left, f"kept for the backward, {LENGTHS[-1]} tokens", y="MiB", legend={})
    for kind, _, _ in KINDS:
        peak = [row["peak (B)"] / 2**20 for row in report.rows if row["kind"] == kind]
        right.loglog(LENGTHS, peak, "o-", label=kind)
    label_axes(right, "measured peak of a training step", "tokens", "MiB", {})
    label_ticks(right, LENGTHS)
