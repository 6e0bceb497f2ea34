"""What `headway eval` measures itself: a text, or records as a task trains on them. Imports nothing heavy."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headway.cli._progress import progress
from headway.cli._shared import attributes, note, print_report
from headway.errors import CheckpointError
from headway.report import table

if TYPE_CHECKING:
    import torch

    from headway.checkpoints.folder import Folder
    from headway.models import Model
    from headway.train.config import TrainConfig
    from headway.train.evaluation import Evaluation
    from headway.train.microbatch_pool import MicrobatchPool

WIDEST = 20  # classes whose confusion is a table for a terminal


def print_evaluation(
    source: "Folder",
    config: "TrainConfig",
    dtype: "torch.dtype | None",
    limit: int | None,
    backend: str,
    json: bool,
) -> None:
    """Measure a model as the task of the settings does, and print what is found."""
    import torch

    from headway.checkpoints.restore import build_model
    from headway.storage.dtypes import dtype_name
    from headway.train.inputs import Inputs
    from headway.train.microbatch_pool import MicrobatchPool
    from headway.train.rows_config import TextConfig
    from headway.train.tasks import find_task

    model = build_model(source, dtype=dtype, backend=backend)
    task = find_task(str(config.task))(Inputs(config, source))
    given = vars(config)
    data = given.get("data") or f"{given.get('source', '')} and {given.get('target', '')}"
    report: dict[str, Any] = {"model": str(source.path), "task": config.task, "data": data}
    report["dtype"] = dtype_name(next(model.parameters()).dtype)
    with MicrobatchPool(torch.get_num_threads()) as pool:
        if isinstance(config, TextConfig):
            measured, remarks = measure_text(task, model, pool, limit)
            known = ("tokens", "text_bytes", "loss", "perplexity", "bits_per_byte", "accuracy")
            report |= {"context": config.context, **attributes(measured, *known)}
        else:
            with progress(f"evaluating {data}"):
                measured, remarks = task.measure(model, pool, limit)
            counted = f"{measured.unit}s".replace(" ", "_")
            report |= {counted: measured.tokens, "loss": measured.loss, **measured.metrics}
    check_finite(measured.loss, model, str(source.path))
    for remark in remarks:
        note(remark)
    report[f"{measured.unit}s_per_s".replace(" ", "_")] = measured.tokens / measured.seconds
    tables = [
        table(
            ("what", "value"),
            [
                (name.replace("_", " "), value)
                for name, value in report.items()
                if value is not None and name not in ("model", "data")
            ],
        )
    ]
    if measured.positions:
        before, more = (
            ("tokens to look back on", ()) if source.spec.causal else ("tokens before it", ("accuracy",))
        )
        report["positions"] = [
            attributes(one, "first", "last", "tokens", "loss", "accuracy") for one in measured.positions
        ]
        rows = [
            (f"{one.first}-{one.last}", *attributes(one, "tokens", "loss", *more).values())
            for one in measured.positions
        ]
        tables.append(table((before, "predictions", "nats per token", *more), rows))
    if (confusion := measured.confusion) is not None:
        report |= {"classes": confusion.classes, "labels": confusion.labels, "confusion": confusion.counts}
        names = ("precision", "recall", "f1", "count")
        rows = [(one.label, *attributes(one, *names).values()) for one in confusion.classes]
        tables.append(table(("class", "precision", "recall", "f1", "records"), rows))
        if len(confusion.labels) <= WIDEST:
            counts = [(name, *row) for name, row in zip(confusion.labels, confusion.counts, strict=True)]
            tables.append(table(("records of \\ taken for", *confusion.labels), counts))
    print_report(report, "\n\n".join(tables), json)


def measure_text(
    task: Any, model: Any, pool: "MicrobatchPool", limit: int | None
) -> "tuple[Evaluation, Sequence[str]]":
    """The loss on a text, in rows as the task makes them, and what is to be said of it."""
    from headway.data import Rows
    from headway.surgery import Text
    from headway.train import evaluation

    config, folder = task.config, task.inputs.folder
    length, trained = config.context, folder.spec.trained_context
    with progress(f"encoding {config.data}"):
        opened = Text.read(config.data, folder, framed=task.in_template)
    with opened as text:
        rows = task.rows(text.file, text.tokenizer, folder.spec)
        scored = f"{rows.targets(limit)} tokens" if isinstance(rows, Rows) else "masked tokens"
        with progress(f"evaluating {scored} in rows of {length}") as advance:
            found = evaluation.evaluate(model, rows, limit=limit, pool=pool, progress=advance)
    beyond = (
        f"rows of {length} tokens are longer than the {trained} that this model was trained on: what it predicts "
        "beyond them is in the loss; leave --context out for the rows that it knows"
    )
    return found, [beyond] if length > trained else []


def check_finite(loss: float, model: "Model", source: str) -> None:
    """Raise CheckpointError for a loss that is no number, naming the weights that are none."""
    if math.isfinite(loss):
        return
    broken = [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]
    more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
    why = (
        f"these weights are not finite: {', '.join(broken[:3])}{more}"
        if broken
        else "its weights are finite, its activations overflow; try --dtype fp32"
    )
    raise CheckpointError(f"{source}: the loss on this text is {loss}: {why}")
