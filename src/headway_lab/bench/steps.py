"""Steps of whole models, as values: what headway does again and again, and others with the same weights; their rows.

Legend: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headway.models import ModelSpec
from headway_lab.bench.inputs import OURS, Problem, Side
from headway_lab.bench.llama_cpp import NAME as LLAMA_CPP
from headway_lab.bench.llama_cpp import system_info
from headway_lab.bench.measure import Effort, measured
from headway_lab.bench.models import available
from headway_lab.bench.rows import Row, machine

MakeSide = Callable[[], Side]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step, whose sides are made when it is measured; each of these raises UnsupportedCase where it cannot be.

    bench, name, dtype  of its rows; a step of "decode" gives one more token of each text, behind the others
    spec                the model
    rows, tokens        B texts of T tokens
    work                bytes that a step of "decode" reads, else FLOPs of its products
    ours, peers         make the sides
    beside              headway's other steps, and by what their time is multiplied to be compared
    tolerance           how far results may be apart (`measure.difference`)
    peak                bytes that a side holds at its peak, where that is asked for
    """

    bench: str
    name: str
    dtype: str
    spec: ModelSpec
    rows: int
    tokens: int
    work: Callable[[], float]
    ours: MakeSide
    peers: Mapping[str, MakeSide]
    tolerance: float
    beside: Mapping[str, tuple[MakeSide, float]] = field(default_factory=dict)
    peak: Callable[[str], int] | None = None

    @property
    def decodes(self) -> bool:
        return self.bench == "decode"

    @property
    def tokens_done(self) -> int:
        """Tokens that a step makes, or reads."""
        return self.rows * (1 if self.decodes else self.tokens)


def beside_peers(step: Step, effort: Effort) -> Row:
    """The row of a step: its work over its time, and of every side tokens per second and, if asked for, the peak."""
    blank = Row(step.bench, step.name, step.dtype, machine=machine("auto"))
    row = measured(blank, lambda: _problem(step), effort)
    if row.ours_ms is None:
        return row
    speeds = {side: step.tokens_done / ms * 1e3 for side, ms in {OURS: row.ours_ms, **row.peers}.items()}
    row.extra.update(tokens_per_second=speeds.pop(OURS), peers_tokens_per_second=speeds)
    row.extra["bytes" if step.decodes else "flops"] = step.work()
    if step.peak is not None:
        peaks = {side: step.peak(side) / 2**20 for side in (OURS, *row.peers)}
        row.extra.update(ours_mib=peaks.pop(OURS), peers_mib=peaks)
    if LLAMA_CPP in row.peers:
        row.machine[LLAMA_CPP] = system_info()
    return row


def _problem(step: Step) -> Problem:
    bound = "reads" if step.decodes else "products"
    problem = Problem({OURS: step.ours()}, step.work(), bound, tolerance=step.tolerance)
    problem.sides |= available(step.peers, problem.notes)
    for name, (make, scale) in step.beside.items():
        problem.sides[name], problem.scale[name] = make(), scale
    problem.unrelated = frozenset(step.beside)
    return problem
