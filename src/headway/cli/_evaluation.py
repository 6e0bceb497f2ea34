"""What `headway eval` measures itself: a text, or records as a task trains on them. Imports nothing heavy."""

import math
from collections.abc import Sequence
from pathlib import Path
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
    from headway.train.text_config import TextConfig

WIDEST = 20  # classes whose confusion is a table for a terminal


def print_records(
    source: "Folder",
    adapters: Sequence[str | Path],
    config: "TrainConfig",
    dtype: "torch.dtype | None",
    limit: int | None,
    backend: str,
    json: bool,
) -> None:
    import torch

    from headway.checkpoints.adapters import GENERATION, attach_folders
    from headway.checkpoints.restore import build_model
    from headway.storage.dtypes import dtype_name
    from headway.storage.files import current_folder
    from headway.storage.reading import read_json
    from headway.text import Tokenizer, first_file
    from headway.train.microbatch_pool import MicrobatchPool
    from headway.train.tasks import find_task
    from headway.train.tasks.base import Subject

    task, model = find_task(str(config.task)), build_model(source, dtype=dtype, backend=backend)
    attach_folders(model, adapters)
    own = [current_folder(path) for path in reversed(adapters)]
    home = next((path for path in own if first_file(path) is not None), source.path)
    said = next((read_json(path / GENERATION) for path in own if (path / GENERATION).exists()), {})
    subject = Subject(model, Tokenizer.load(home), {**source.generation, **said})
    data = (
        getattr(config, "data", None)
        or f"{getattr(config, 'source', '')} and {getattr(config, 'target', '')}"
    )
    with progress(f"evaluating {data}"), MicrobatchPool(torch.get_num_threads()) as pool:
        measured, remarks = task.measure(config, subject, pool, limit)
    for remark in remarks:
        note(remark)
    check_finite(measured.loss, model, str(source.path))
    unit = measured.unit.replace(" ", "_")
    report: dict[str, Any] = {
        "model": str(source.path),
        "task": config.task,
        "data": data,
        "dtype": dtype_name(next(model.parameters()).dtype),
        f"{unit}s": measured.tokens,
        "loss": measured.loss,
        **measured.metrics,
        f"{unit}s_per_s": measured.tokens / measured.seconds,
    }
    facts = [
        (name.replace("_", " "), value) for name, value in report.items() if name not in ("model", "data")
    ]
    tables = [table(("what", "value"), facts)]
    if (confusion := measured.confusion) is not None:
        report |= {"classes": confusion.classes, "labels": confusion.labels, "confusion": confusion.counts}
        names = ("precision", "recall", "f1", "count")
        rows = [(one.label, *attributes(one, *names).values()) for one in confusion.classes]
        tables.append(table(("class", "precision", "recall", "f1", "records"), rows))
        if len(confusion.labels) <= WIDEST:
            counts = [(name, *row) for name, row in zip(confusion.labels, confusion.counts, strict=True)]
            tables.append(table(("records of \\ taken for", *confusion.labels), counts))
    print_report(report, "\n\n".join(tables), json)


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


def print_text(
    source: "Folder",
    adapters: Sequence[str | Path],
    config: "TextConfig",
    dtype: "torch.dtype | None",
    limit: int | None,
    backend: str,
    json: bool,
) -> None:
    import torch

    from headway.checkpoints.adapters import attach_folders
    from headway.checkpoints.restore import build_model
    from headway.data import Rows
    from headway.models import Decoder, Encoder
    from headway.storage.dtypes import dtype_name
    from headway.surgery import Text
    from headway.train import evaluation
    from headway.train.microbatch_pool import MicrobatchPool
    from headway.train.tasks import text_tasks

    spec, task = source.spec, text_tasks()[str(config.task)]
    data, length = config.data, config.context
    found_model = build_model(source, dtype=dtype, backend=backend)
    assert isinstance(found_model, (Decoder, Encoder))
    attach_folders(found_model, adapters)
    with progress(f"encoding {data}"):
        opened = Text.read(data, source, framed=task.in_template)
    with opened as text, MicrobatchPool(torch.get_num_threads()) as pool:
        rows_of = task.rows(text.file, config, text.tokenizer, spec)
        scored = f"{rows_of.targets(limit)} tokens" if isinstance(rows_of, Rows) else "masked tokens"
        with progress(f"evaluating {scored} in rows of {length}") as advance:
            found = evaluation.evaluate(found_model, rows_of, limit=limit, pool=pool, progress=advance)
    check_finite(found.loss, found_model, str(source.path))
    if length > spec.trained_context:
        note(
            f"rows of {length} tokens are longer than the {spec.trained_context} that this model was trained on: what "
            "it predicts beyond them is in the loss; leave --context out for the rows that it knows"
        )
    report = {
        "model": str(source.path),
        "data": data,
        "dtype": dtype_name(next(found_model.parameters()).dtype),
        "context": length,
        **attributes(found, "tokens", "text_bytes", "loss", "perplexity", "bits_per_byte", "accuracy"),
        "tokens_per_s": found.tokens / found.seconds,
        "positions": [attributes(b, "first", "last", "tokens", "loss", "accuracy") for b in found.positions],
    }
    hidden = {"model", "data", "positions", "accuracy" if spec.causal else "bits_per_byte"}
    facts = [(name.replace("_", " "), value) for name, value in report.items() if name not in hidden]
    before, more = ("tokens to look back on", ()) if spec.causal else ("tokens before it", ("accuracy",))
    rows = [
        (f"{b.first}-{b.last}", *attributes(b, "tokens", "loss", *more).values()) for b in found.positions
    ]
    columns = (before, "predictions", "nats per token", *more)
    print_report(report, f"{table(('what', 'value'), facts)}\n\n{table(columns, rows)}", json)
