"""`headway eval MODEL --data DATA [--task TASK] | --harness TASKS`: evaluates a model on a text, on the task that it
was trained for, or on tasks of lm-evaluation-harness."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headway.cli._options import Count, Model, Whole, says
from headway.cli._shared import attributes, note, print_report, progress, set_threads
from headway.errors import CheckpointError, ConfigError
from headway.report import table

if TYPE_CHECKING:
    import torch

    from headway.checkpoints.folder import Folder
    from headway.train.config import TrainConfig
    from headway.train.evaluation import Evaluation
    from headway.train.microbatch_pool import MicrobatchPool

WIDEST = 20  # maximum number of classes of a confusion matrix that is printed


def command(
    model: Model,
    settings: Annotated[list[str] | None, says(metavar="[KEY=VALUE]...")] = None,
    *,
    data: str | None = None,
    task: str | None = None,
    harness: Annotated[str | None, says(metavar="TASK[,TASK]")] = None,
    tasks: Path | None = None,
    shots: Whole | None = None,
    chat: bool = False,
    batch_size: Count | None = None,
    adapter: list[Path] | None = None,
    any_base: bool = False,
    context: int | None = None,
    dtype: str = "auto",
    limit: Count | None = None,
    threads: int | None = None,
    backend: str = "auto",
    json: bool = False,
) -> None:
    """Evaluate a model on a text: bits per byte, perplexity and loss by position; for an encoder, loss and accuracy on
    masked tokens with a fixed mask, or the metrics of its head on records (accuracy, F1, exact match; for a classifier
    also the confusion matrix). With --task chat the loss of answers, with --task preference the share of pairs that are
    ranked correctly, and likewise for other training tasks. With --harness, the results of lm-evaluation-harness.

    settings: settings of the task, as in training (too_long=cut)
    data: text file, records with a "text" each (.jsonl, .json, .csv, .tsv), folder of .txt and .jsonl files,
        or token file (.tokens); for other tasks their records
    task: evaluate as training of this task evaluates held-out data: causal-lm, masked-lm, translation, chat,
        preference, classify, tag, answer, embed [default: by the model's head, or on text]
    harness: tasks of lm-evaluation-harness, instead of a text
    tasks: folder of YAML files with harness tasks of your own
    shots: solved examples before each document of a task [default: the task's]
    chat: apply the chat template to the documents of tasks
    batch_size: rows of a task computed at once; does not change results [default: 32]
    limit: only the first N tokens of the text, N records (drawn with a fixed seed), or N documents per task
    """
    prefixes = [f"{name}=" for name, value in (("data", data), ("context", context)) if value is not None]
    if twice := [item for item in settings or () if item.startswith(tuple(prefixes))]:
        raise ConfigError(f"{twice[0]} is given as an option too; give it once")
    if (data is None and not settings) == (harness is None):
        raise ConfigError("eval needs either a text (--data FILE) or tasks (--harness TASK[,TASK])")
    set_threads(threads)
    from headway.storage.dtypes import named_dtype

    kind = named_dtype(dtype)
    if harness is not None:
        if task is not None or settings:
            raise ConfigError("--task and KEY=VALUE are for headway's own tasks, not for --harness")
        try:
            from headway.integrations import lm_eval
        except ImportError as error:
            raise ConfigError(str(error)) from None
        from headway.api import load

        loading: Any = {"dtype": kind, "backend": backend, "adapter": adapter or [], "any_base": any_base}
        lm = load(model, task="causal-lm", **loading)
        results = lm_eval.evaluate(
            lm, harness.split(","), folder=None if tasks is None else str(tasks), limit=limit, shots=shots,
            context=context, batch_size=batch_size or 32, chat=chat,
        )  # fmt: skip
        print_harness(str(model), results, json)
        return
    if chat or any(option is not None for option in (tasks, shots, batch_size)):
        raise ConfigError("--tasks, --shots, --chat and --batch-size are for --harness, not for a text")
    from headway.checkpoints.bases import with_adapters, with_base
    from headway.checkpoints.folder import load_folder
    from headway.train.config_io import measuring_settings, parse_overrides
    from headway.train.tasks import task_of

    base, folders = with_base(model, adapter or ())
    source = with_adapters(load_folder(base), folders, any_base=any_base)
    options = {"data": data, "context": context}
    values = {name: value for name, value in options.items() if value is not None}
    config = measuring_settings(
        task or task_of(source.spec), source.spec, values | parse_overrides(settings or ())
    )
    kind, choice = source.choose_dtype(kind)
    note(f"in {choice}")
    print_evaluation(source, config, kind, limit, backend, json)


def print_harness(model: str, output: dict[str, Any], json: bool) -> None:
    """Prints the results of lm-evaluation-harness."""
    results, documents = output["results"], output["n-samples"]
    rows = [
        (
            task,
            documents.get(task, {}).get("effective"),
            name.removesuffix(",none"),
            value,
            row[_error(name)],
        )
        for task, row in results.items()
        for name, value in row.items()
        if _error(name) in row
    ]
    report = table(("task", "documents", "metric", "value", "standard error"), rows)
    print_report({"model": model, "results": results, "documents": documents}, report, json)


def _error(metric: str) -> str:
    """Returns the harness's name for the standard error of a metric: acc_stderr,none for acc,none."""
    name, comma, kind = metric.partition(",")
    return f"{name}_stderr{comma}{kind}"


def print_evaluation(
    source: "Folder",
    config: "TrainConfig",
    dtype: "torch.dtype | None",
    limit: int | None,
    backend: str,
    json: bool,
) -> None:
    """Evaluates a model as the task of the settings does, and prints the results."""
    import torch

    from headway.checkpoints.restore import build_model
    from headway.storage.dtypes import dtype_name
    from headway.train.inputs import Inputs
    from headway.train.microbatch_pool import MicrobatchPool
    from headway.train.rows_config import TextConfig
    from headway.train.tasks import find_task

    model = build_model(source, dtype=dtype, backend=backend)
    task = find_task(str(config.task))(Inputs(config, source))
    values = vars(config)
    data = values.get("data") or f"{values.get('source', '')} and {values.get('target', '')}"
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
            attributes(span, "first", "last", "tokens", "loss", "accuracy") for span in measured.positions
        ]
        rows = [
            (f"{span.first}-{span.last}", *attributes(span, "tokens", "loss", *more).values())
            for span in measured.positions
        ]
        tables.append(table((before, "predictions", "nats per token", *more), rows))
    if (confusion := measured.confusion) is not None:
        report |= {"classes": confusion.classes, "labels": confusion.labels, "confusion": confusion.counts}
        names = ("precision", "recall", "f1", "count")
        rows = [(scores.label, *attributes(scores, *names).values()) for scores in confusion.classes]
        tables.append(table(("class", "precision", "recall", "f1", "records"), rows))
        if len(confusion.labels) <= WIDEST:
            counts = [(name, *row) for name, row in zip(confusion.labels, confusion.counts, strict=True)]
            tables.append(table(("records of \\ taken for", *confusion.labels), counts))
    print_report(report, "\n\n".join(tables), json)


def measure_text(
    task: Any, model: Any, pool: "MicrobatchPool", limit: int | None
) -> "tuple[Evaluation, Sequence[str]]":
    """Returns the loss on a text, in rows as the task makes them, and remarks about it."""
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
            result = evaluation.evaluate(model, rows, limit=limit, pool=pool, progress=advance)
    beyond = (
        f"rows of {length} tokens are longer than the {trained} that this model was trained on: what it predicts "
        "beyond them is in the loss; leave --context out for the rows that it knows"
    )
    return result, [beyond] if length > trained else []


def check_finite(loss: float, model: "torch.nn.Module", source: str) -> None:
    """Raises CheckpointError for a loss that is not finite, naming the weights that are not finite."""
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
