"""Why attention eats memory: what a training step keeps, by cause, predicted and measured.

(Beltagy et al. 2020, section 1, for the claim; the causes are counted in `headway.models.cost.activation_bytes`.)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.models import Decoder, ModelSpec, build, cost
from headway.patterns import Causal, Pattern, Window
from headway_lab.explain import TOPICS, Report

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


@dataclass(frozen=True)
class Kept:
    """One training step of one row, in bytes: predicted by cause, kept by autograd, and live at the worst
    moment."""

    kind: str
    length: int
    pairs: int
    predicted: dict[str, int]
    kept: int
    peak: int
    parameters: int

    @property
    def activations(self) -> int:
        """What grows with the length and is not n x n."""
        return sum(self.predicted.values()) - self.predicted["scores"]


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
        self._live = {at: held for at, held in self._live.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out


def run() -> Report:
    """One training step at each length and kind: predicted, kept, and live at the worst moment.

    On one thread: the steps are too small to share."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        return judge([measure(*kind, n) for kind in KINDS for n in LENGTHS])
    finally:
        torch.set_num_threads(threads)


def measure(kind: str, pattern: Pattern, backend: str, length: int) -> Kept:
    """One step of a fresh model on one random row."""
    spec = ModelSpec.of("llama", patterns=pattern, **FIELDS)
    model = build(spec, dtype=torch.float32, seed=SEED, backend=backend)
    assert isinstance(model, Decoder)
    ids = torch.randint(spec.vocab, (1, length), generator=torch.Generator().manual_seed(SEED))
    scores = cost.activation_bytes(spec, length, scores="stored" if backend == "dense" else "recomputed")
    kept = kept_bytes(model, ids)
    with LiveBytes() as live:
        loss(model, ids).backward()
    return Kept(
        kind,
        length,
        cost.attention_pairs(spec, length),
        scores,
        kept,
        live.peak,
        cost.weight_bytes(spec, torch.float32),
    )


def loss(model: Decoder, ids: Tensor) -> Tensor:
    """The mean of -log p of every token (its own id as target: only memory matters here)."""
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def kept_bytes(model: Decoder, ids: Tensor) -> int:
    """Bytes of the distinct tensors that autograd keeps for the backward, but parameters and ids."""
    sizes: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        if not t.dtype.is_floating_point and t.dtype != torch.bool:
            return t
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        kept = loss(model, ids)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert kept.requires_grad
    return sum(size for at, size in sizes.items() if at not in own)


def judge(steps: list[Kept]) -> Report:
    """The verdict: predicted is kept; scores grow 16-fold, the rest 4-fold; recomputing removes the scores."""
    rows = tuple(
        (
            s.kind,
            s.length,
            s.pairs,
            s.predicted["scores"],
            s.predicted["attention"],
            s.predicted["norms"],
            s.predicted["feed-forward"],
            s.predicted["logits"],
            sum(s.predicted.values()),
            s.kept,
            s.peak,
        )
        for s in steps
    )
    by = {(s.kind, s.length): s for s in steps}
    short, long = LENGTHS[0], LENGTHS[-1]
    stored = by["n x n stored", short], by["n x n stored", long]
    growth = stored[1].predicted["scores"] / stored[0].predicted["scores"]
    rest = stored[1].activations / stored[0].activations
    # The banded kernel hands its output over in another layout and so keeps it twice: 4 H D bytes a token more.
    error = max(
        abs(s.kept - sum(s.predicted.values()) - twice(s)) / (sum(s.predicted.values()) + twice(s))
        for s in steps
    )
    peaks = {kind: by[kind, long].peak / by[kind, short].peak for kind, _, _ in KINDS}
    right = growth == 16 and rest == 4 and error < CLOSE
    same = len({s.parameters for s in steps}) == 1
    seen = right and same and peaks["n x n stored"] > 12 and max(peaks["recomputed"], peaks["window"]) < 5
    last = {kind: by[kind, long] for kind, _, _ in KINDS}
    whole = last["n x n stored"]
    share = whole.predicted["scores"] / sum(whole.predicted.values())
    return Report(
        topic="memory",
        question=TOPICS["memory"][1],
        formula=FORMULA,
        columns=(
            "kind",
            "n",
            "pairs",
            "scores (B)",
            "attention (B)",
            "norms (B)",
            "ffn (B)",
            "logits (B)",
            "predicted (B)",
            "kept (B)",
            "peak (B)",
        ),
        rows=rows,
        seen=seen,
        setting=(
            f"one row, {FIELDS['layers']} layers of width {FIELDS['width']}, {FIELDS['heads']} heads, feed-forward "
            f"{FIELDS['hidden']}, vocab {FIELDS['vocab']}, window {WINDOW}, float32, seed {SEED}"
        ),
        finding=(
            f"autograd keeps what the formula says within {100 * error:.1f} %; from {short} to {long} tokens the "
            f"stored scores grow {growth:.0f}-fold and the other activations {rest:.0f}-fold, so that at {long} "
            f"scores are {100 * share:.0f} % of what is kept; the measured peak grows {peaks['n x n stored']:.1f}-fold "
            f"where scores are stored, {peaks['recomputed']:.1f}-fold where they are recomputed and "
            f"{peaks['window']:.1f}-fold with a window; what the window spares is work (it leaves "
            f"{last['window'].pairs / whole.pairs:.2g} of the pairs), not parameters ({whole.parameters:,} bytes)"
        ),
    )


def twice(step: Kept) -> int:
    """Bytes that the kernel of this kind keeps beyond the formula."""
    copies = step.length * 4 * FIELDS["width"] * FIELDS["layers"]
    return copies if step.kind == "window" else 0


def draw(figure: Any, report: Report) -> None:
    """Left: what is kept at the longest row, by cause. Right: the measured peak against the length."""
    figure.set_size_inches(9, 3.8)
    left, right = figure.subplots(1, 2)
    kinds = [kind for kind, _, _ in KINDS]
    last = [row for row in report.rows if row[1] == LENGTHS[-1]]
    below = [0.0] * len(last)
    for name in ("norms", "ffn", "logits", "attention", "scores"):
        at = report.columns.index(f"{name} (B)")
        sizes = [float(row[at] or 0) / 2**20 for row in last]
        left.bar(kinds, sizes, bottom=below, label=name)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    left.set(title=f"kept for the backward, {LENGTHS[-1]} tokens", ylabel="MiB")
    left.legend()
    for kind in kinds:
        peak = [float(row[-1] or 0) / 2**20 for row in report.rows if row[0] == kind]
        right.loglog(LENGTHS, peak, "o-", label=kind)
    right.set(title="measured peak of a training step", xlabel="tokens", ylabel="MiB")
    right.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    right.minorticks_off()
    right.legend()
