"""A trained head measured on records: `headway eval MODEL --data RECORDS`."""

from __future__ import annotations

from headway.errors import ConfigError
from headway.models import Encoder
from headway.text import Tokenizer
from headway.train.evaluation import Evaluation
from headway.train.head_rows import evaluate_rows
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.records import read_all, sample
from headway.train.tasks import head_task_of


def evaluate_head(
    model: Encoder,
    tokenizer: Tokenizer,
    data: str,
    *,
    context: int | None = None,
    cut: bool = False,
    limit: int | None = None,
    pool: MicrobatchPool | None = None,
) -> tuple[Evaluation, list[str]]:
    """Loss and scores of the model's head on the records of a file, as its training measures held-out ones, and what is
    to be said of the records.

    context: most tokens of a row (the model's own unless given).   cut: read the beginning of texts that are longer
    (those that tell tags and answers are read in windows without it).   limit: so many of the records, drawn
    whatever their order, the same ones each time.
    Raises ConfigError for a head that records do not measure, and DataError for records that do not fit."""
    spec = model.spec
    task = head_task_of(spec)
    if task is None:
        raise ConfigError(f"Head({spec.head.task!r}) is measured on text, not on records")
    length = context or min(spec.trained_context, spec.context_limit or spec.trained_context)
    if spec.context_limit is not None and length > spec.context_limit:
        raise ConfigError(
            f"context {length} is more than the {spec.context_limit} tokens that this model can take"
        )
    given = {"data": data, "context": length} | ({"too_long": "cut"} if cut else {})
    records, remarks = read_all(data, task.measured or task.kinds)
    if limit is not None and limit < len(records):
        remarks = [*remarks, f"{limit} of {len(records)} records are measured, drawn by a fixed seed"]
    records = [records[i] for i in sample(len(records), limit)]
    rows = task.rows(records, tokenizer, spec, task.settings.of(given))
    return evaluate_rows(model, rows, pool), [*remarks, *rows.remarks]
