"""Why attention takes so much memory: what a training step keeps, by cause, predicted and measured.

(Beltagy et al. 2020, section 1, for the claim; the causes are counted in `headway.models.cost.activation_bytes`.)
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.attention import BACKENDS
from headway.errors import ConfigError
from headway.models import Model, ModelSpec, build, cost
from headway.patterns import Causal, Pattern, Window
from headway_lab.explain.figures import Figure, curves, panels
from headway_lab.explain.report import Report, Row, Rows
from headway_lab.profiling import one_thread, saved_bytes

WINDOW, SEED = 128, 0
CLOSE, PEAK_CLOSE = 0.01, 0.1
FIELDS = {"vocab": 64, "width": 64, "layers": 2, "heads": 4, "kv_heads": 4, "hidden": 128}
KINDS: tuple[tuple[str, Pattern, str], ...] = (
    ("n x n stored", Causal(), "dense"),
    ("recomputed", Causal(), "sdpa"),
    ("window", Window.last(WINDOW), "banded"),
)
CAUSES = {
    "norms": "grey",
    "feed-forward": "green",
    "logits": "violet",
    "tables": "ink",
    "attention": "blue",
    "scores": "red",
}
COPIES = {"banded": 1}  # further copies of the output, besides the one that every backend keeps


class LiveBytes(TorchDispatchMode):
    """Measures the peak bytes of simultaneously alive tensors created while it is active (memory inside a single
    operation is not seen)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            storage = t.untyped_storage() if isinstance(t, Tensor) else None
            if storage is not None and storage._cdata not in inputs:
                self._live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self._live = {address: entry for address, entry in self._live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out


def run(*, context: int = 2048) -> Report:
    """Measures one training step of each kind at a quarter, a half and the whole of `context`: bytes predicted, kept,
    and alive at the peak. Raises ConfigError for a context whose quarter is within the window."""
    if context < 4 * WINDOW or context % 4:
        raise ConfigError(
            f"explain memory: --context {context} must be at least {4 * WINDOW} and a multiple of 4"
        )
    with one_thread():
        rows = [measure(*kind, n) for kind in KINDS for n in (context // 4, context // 2, context)]
        return judge(rows, parameter_bytes())


def spec_of(pattern: Pattern) -> ModelSpec:
    """Returns the model spec of one kind."""
    return ModelSpec.of("llama", patterns=pattern, **FIELDS)


def parameter_bytes() -> set[int]:
    """Returns the parameter bytes of the models of all kinds: a set of one number."""
    return {4 * cost.parameter_count(spec_of(pattern)) for _, pattern, _ in KINDS}


def predicted(pattern: Pattern, backend: str, n: int) -> dict[str, int]:
    """Returns the bytes kept, by cause and in all, and those held at the peak."""
    spec, stored = spec_of(pattern), BACKENDS[backend].capabilities.stores_scores
    by_cause = cost.activation_bytes(spec, n, scores="stored" if stored else "recomputed")
    kept_twice = COPIES.get(backend, 0) * 4 * spec.layers * n * spec.width
    causes = {**by_cause, "attention": by_cause["attention"] + kept_twice, "tables": 8 * n * spec.head_dim}
    causes["logits"] = 4 * n * spec.vocab  # log-probabilities: the loss is of all logits at once
    total = sum(causes.values())
    working = 16 * spec.heads * n * n if stored else 4 * n * (4 * spec.hidden + 3 * spec.width)
    return {
        **{f"{cause} (B)": causes[cause] for cause in CAUSES},
        "predicted (B)": total,
        "predicted peak (B)": total + working,
    }


def measure(kind: str, pattern: Pattern, backend: str, length: int) -> Row:
    """Returns the bytes of one step of a fresh model on one random row: predicted by cause, kept by autograd, and alive
    at the peak."""
    spec = spec_of(pattern)
    model = build(spec, dtype=torch.float32, seed=SEED, backend=backend)
    ids = torch.randint(spec.vocab, (1, length), generator=torch.Generator().manual_seed(SEED))
    _, saved = saved_bytes(lambda: loss(model, ids), model)
    with LiveBytes() as live:
        loss(model, ids).backward()
    return {
        "kind": kind,
        "n": length,
        "pairs": cost.attention_pairs(spec, length),
        **predicted(pattern, backend, length),
        "kept (B)": saved,
        "peak (B)": live.peak,
    }


def loss(model: Model, ids: Tensor) -> Tensor:
    """Returns the mean of -log p of every token (with its own id as target: only memory matters here)."""
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def judge(rows: Rows, parameters: set[int]) -> Report:
    """Returns the verdict: kept bytes and the peak are predicted; scores grow 16-fold, everything else 4-fold;
    recomputing removes the scores; a window changes the pairs and no parameters."""
    short, long = min(row["n"] for row in rows), max(row["n"] for row in rows)
    row_at = {(row["kind"], row["n"]): row for row in rows}
    before, after = row_at["n x n stored", short], row_at["n x n stored", long]
    pairs = {kind: row_at[kind, long]["pairs"] for kind, _, _ in KINDS}
    growth = after["scores (B)"] / before["scores (B)"]
    # The growth of everything that is not n x n.
    other_growth = (after["predicted (B)"] - after["scores (B)"]) / (
        before["predicted (B)"] - before["scores (B)"]
    )
    kept_error = max(abs(row["predicted (B)"] / row["kept (B)"] - 1) for row in rows)
    peak_error = max(abs(row["predicted peak (B)"] / row["peak (B)"] - 1) for row in rows)
    kept, peak = (
        {
            kind: row_at[kind, long][f"{quantity} (B)"] / row_at[kind, short][f"{quantity} (B)"]
            for kind, _, _ in KINDS
        }
        for quantity in ("kept", "peak")
    )
    return Report(
        rows=tuple(rows),
        claims={
            "kept": kept_error < CLOSE,
            "peak": peak_error < PEAK_CLOSE,
            "length": (growth, other_growth) == (16, 4),
            "linear": all(
                abs(ratio[kind] / 4 - 1) < PEAK_CLOSE
                for kind in ("recomputed", "window")
                for ratio in (kept, peak)
            ),
            "window": (
                pairs["window"] < pairs["recomputed"] == pairs["n x n stored"] and len(parameters) == 1
            ),
        },
        values={
            "off": kept_error,
            "off_peak": peak_error,
            "growth": growth,
            "rest": other_growth,
            "share": after["scores (B)"] / after["predicted (B)"],
            "peak": peak,
            "spared": pairs["window"] / pairs["recomputed"],
            "parameters": max(parameters),
        },
    )


BY_CAUSE = {f"{cause} (B)": f"o- {colour}" for cause, colour in CAUSES.items()}
PEAKS = {"n x n stored": "o- red", "recomputed": "o- blue", "window": "x-- green"}


def draw(figure: Figure, report: Report) -> None:
    """Draws on the left the causes if scores are stored, and on the right the measured peak."""
    stored = replace(report, rows=tuple(row for row in report.rows if row["kind"] == KINDS[0][0]))
    causes = curves("n", BY_CAUSE, "kept where scores are stored", "bytes", log="xy")
    peaks = curves("n", PEAKS, "peak of a training step", "bytes", of="peak (B)", by="kind", log="xy")
    panels(lambda axes, _: causes(axes, stored), peaks)(figure, report)
