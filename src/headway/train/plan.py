"""Which rows each step reads, and how long the run is: a pure function of settings and data."""

from __future__ import annotations

from dataclasses import dataclass

from headway.data import rows_from
from headway.train.text_config import TextConfig


@dataclass(frozen=True)
class Plan:
    """Steps of a run over a corpus of `rows` rows.

    Attributes:
        rows: rows of the corpus, each read once per epoch, in an order drawn by (seed, epoch).
        rows_per_step: rows of one optimizer step.
        steps: optimizer steps; None when the clock decides.
        total_rows: rows that all steps read together; None when the clock decides.
        micro_batch: rows of one forward pass.
    """

    seed: int
    rows: int
    rows_per_step: int
    steps: int | None
    total_rows: int | None
    micro_batch: int

    @staticmethod
    def of(config: TextConfig, rows: int, workers: int = 1) -> Plan:
        """With `epochs`, the last step reads what is left of the last epoch, be it less than a full window.

        Where `micro_batch` is not given, the rows of a step are shared among `workers`."""
        per_step = config.rows_per_step
        micro_batch = config.micro_batch or -(-per_step // workers)
        if config.max_seconds is not None:
            steps, total = None, None
        elif config.steps is not None:
            steps, total = config.steps, config.steps * per_step
        else:
            total = (config.epochs or 1) * rows
            steps = -(-total // per_step)
        return Plan(config.seed, rows, per_step, steps, total, micro_batch)

    def rows_of(self, step: int) -> list[int]:
        """The rows that step `step` (from 0) reads, in order."""
        first = step * self.rows_per_step
        count = self.rows_per_step
        if self.total_rows is not None:
            count = min(count, self.total_rows - first)
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
