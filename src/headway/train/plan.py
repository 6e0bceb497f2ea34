"""Which rows each step of a run reads."""

from __future__ import annotations

from dataclasses import dataclass

from headway.data import rows_from
from headway.train.rows_config import RowsConfig

BYTES_PER_TOKEN = 3.0  # of English or source text under a BPE of a few thousand entries; only for estimates


@dataclass(frozen=True)
class Plan:
    """Steps of a run over a corpus of `rows` rows.

    Attributes:
        rows: rows of the corpus, each read once per epoch, in an order drawn by (seed, epoch).
        rows_per_step: rows of one optimizer step.
        total_rows: rows that all steps read together; None when the clock decides.
        micro_batch: rows of one forward pass.
    """

    seed: int
    rows: int
    rows_per_step: int
    total_rows: int | None
    micro_batch: int

    @staticmethod
    def of(config: RowsConfig, rows: int, workers: int = 1) -> Plan:
        """With `epochs`, the last step reads what is left of the last epoch, be it less than a full window.

        Where `micro_batch` is not given, the rows of a step are shared among `workers`."""
        per_step = config.rows_per_step
        total = config.steps * per_step if config.steps is not None else (config.epochs or 1) * rows
        limit = total if config.max_seconds is None else None
        cut = 1 if config.in_one_pass else workers
        return Plan(config.seed, rows, per_step, limit, config.micro_batch or -(-per_step // cut))

    @property
    def steps(self) -> int | None:
        """Optimizer steps; None when the clock decides."""
        return None if self.total_rows is None else -(-self.total_rows // self.rows_per_step)

    def rows_of(self, step: int) -> list[int]:
        """The rows that step `step` (from 0) reads, in order."""
        first = step * self.rows_per_step
        left = self.rows_per_step if self.total_rows is None else self.total_rows - first
        count = min(self.rows_per_step, left)
        assert count > 0, f"step {step} lies behind the last one"
        return rows_from(self.seed, first, count, self.rows)

    def micro_batches(self, step: int) -> list[list[int]]:
        """The same rows, cut into forward passes."""
        rows = self.rows_of(step)
        return [rows[i : i + self.micro_batch] for i in range(0, len(rows), self.micro_batch)]

    def epoch(self, step: int) -> float:
        """Passes over the data after `step` steps."""
        read = step * self.rows_per_step
        return (read if self.total_rows is None else min(read, self.total_rows)) / self.rows
