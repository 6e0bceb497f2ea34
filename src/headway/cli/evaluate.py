"""`headway eval MODEL --data TEXT | --harness TASKS`: how well a model predicts a text, or does tasks."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli._progress import progress
from headway.cli._shared import (
    MODEL,
    AdapterOption,
    AnyBaseOption,
    BackendOption,
    DtypeOption,
    JsonOption,
    RowOption,
    ThreadsOption,
    TruncateOption,
    attributes,
    folder_of,
    note,
    print_report,
    set_threads,
)
from headway.errors import CheckpointError, ConfigError
from headway.report import table

if TYPE_CHECKING:
    import torch

    from headway.checkpoints.folder import Folder
    from headway.models import Model


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", parser=folder_of, help=MODEL)],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help='text file, records with a "text" each (.jsonl, .json, .csv, .tsv), folder of .txt and .jsonl files, '
            "or token file (.tokens); records of its task, for a model that classifies, tags, answers or embeds",
        ),
    ] = None,
    harness: Annotated[
        str | None,
        typer.Option(
            "--harness", metavar="TASK[,TASK]", help="tasks of lm-evaluation-harness, instead of a text"
        ),
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option("--tasks", help="folder of YAML files with harness tasks of your own")
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(
            "--shots", min=0, help="solved examples before each document of a task [default: the task's]"
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="documents of tasks go through the chat template")
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", min=1, help="rows of a task computed at once; changes no result [default: 32]"
        ),
    ] = None,
    adapter: AdapterOption = None,
    any_base: AnyBaseOption = False,
    context: RowOption = None,
    dtype: DtypeOption = "auto",
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            min=1,
            help="only the first N tokens of the text, N of the records (drawn by a fixed seed), or N documents of "
            "each task",
        ),
    ] = None,
    cut: TruncateOption = False,
    threads: ThreadsOption = None,
    backend: BackendOption = "auto",
    json: JsonOption = False,
) -> None:
    """Bits per byte, perplexity and loss by position of a model on a text; of an encoder, loss and accuracy on masked
    tokens, under one mask for good, or what its head scores on records (accuracy, F1, exact match). With --harness,
    what lm-evaluation-harness finds for its tasks."""
    if (data is None) == (harness is None):
        raise ConfigError("eval needs a text (--data FILE) or tasks (--harness TASK[,TASK]), one of them")
    set_threads(threads)
    from headway.storage.dtypes import named_dtype

    kind = named_dtype(dtype)
    if harness is not None:
        given = {
            "limit": limit,
            "shots": shots,
            "context": context,
            "batch_size": batch_size or 32,
            "chat": chat,
        }
        adapters = {"adapter": adapter or [], "any_base": any_base}
        _harness(str(model), adapters, harness.split(","), tasks, kind, backend, given, json)
        return
    if chat or any(given is not None for given in (tasks, shots, batch_size)):
        raise ConfigError("--tasks, --shots, --chat and --batch-size are for --harness, not for a text")
    assert data is not None
    from headway.checkpoints.bases import check_bases, with_base
    from headway.checkpoints.folder import load_folder
    from headway.train.tasks import head_task_of

    base, folders = with_base(model, adapter or ())
    source = load_folder(base)
    check_bases(folders, source, any_base=any_base)
    kind, choice = source.choose_dtype(kind)
    note(f"in {choice}")
    if head_task_of(source.spec) is not None:
        _records(source, folders, data, context, kind, limit, backend, cut, json)
        return
    if cut:
        raise ConfigError("--cut is for records that a classifier or an embedder reads")
    _text(source, folders, data, context, kind, limit, backend, json)


def _harness(
    model: str,
    adapters: dict[str, Any],
    names: list[str],
    folder: Path | None,
    dtype: "torch.dtype | None",
    backend: str,
    given: dict[str, Any],
    json: bool,
) -> None:
    try:
        from headway.integrations import lm_eval as harness
    except ImportError as error:
        raise ConfigError(str(error)) from None
    from headway.api import load

    lm = load(model, task="causal-lm", dtype=dtype, backend=backend, **adapters)
    found = harness.evaluate(lm, names, folder=None if folder is None else str(folder), **given)
    results, documents = found["results"], found["n-samples"]
    rows = [
        (task, documents.get(task, {}).get("effective"), name.removesuffix(",none"), value, own[_error(name)])
        for task, own in results.items()
        for name, value in own.items()
        if _error(name) in own
    ]
    report = table(("task", "documents", "metric", "value", "standard error"), rows)
    print_report({"model": model, "results": results, "documents": documents}, report, json)


def _error(metric: str) -> str:
    """The harness's name for the standard error of a metric: acc,none has acc_stderr,none."""
    name, comma, kind = metric.partition(",")
    return f"{name}_stderr{comma}{kind}"


def _records(
    source: "Folder",
    adapters: Sequence[str | Path],
    data: str,
    context: int | None,
    dtype: "torch.dtype | None",
    limit: int | None,
    backend: str,
    cut: bool,
    json: bool,
) -> None:
    import torch

    from headway.checkpoints.adapters import attach_folders
    from headway.checkpoints.restore import build_model
    from headway.models import Encoder
    from headway.storage.dtypes import dtype_name
    from headway.text import Tokenizer
    from headway.train.head_evaluation import evaluate_head
    from headway.train.microbatch_pool import MicrobatchPool

    model = build_model(source, dtype=dtype, backend=backend)
    assert isinstance(model, Encoder)
    attach_folders(model, adapters)
    with progress(f"evaluating {data}"), MicrobatchPool(torch.get_num_threads()) as pool:
        found, remarks = evaluate_head(
            model, Tokenizer.load(source.path), data, context=context, cut=cut, limit=limit, pool=pool
        )
    for remark in remarks:
        note(remark)
    _check_finite(found.loss, model, str(source.path))
    report = {
        "model": str(source.path),
        "data": data,
        "dtype": dtype_name(next(model.parameters()).dtype),
        f"{found.unit}s": found.tokens,
        "loss": found.loss,
        **found.metrics,
        f"{found.unit}s_per_s": found.tokens / found.seconds,
    }
    facts = [
        (name.replace("_", " "), value) for name, value in report.items() if name not in ("model", "data")
    ]
    print_report(report, table(("what", "value"), facts), json)


def _check_finite(loss: float, model: "Model", source: str) -> None:
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


def _text(
    source: "Folder",
    adapters: Sequence[str | Path],
    data: str,
    context: int | None,
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
    from headway.train.tasks import text_task_of, text_tasks
    from headway.train.text_config import TextConfig

    spec, task = source.spec, text_tasks()[text_task_of(source.spec)]
    found_model = build_model(source, dtype=dtype, backend=backend)
    assert isinstance(found_model, (Decoder, Encoder))
    attach_folders(found_model, adapters)
    length = context or min(spec.trained_context, 2048)
    with progress(f"encoding {data}"):
        opened = Text.read(data, source, framed=task.in_template)
    with opened as text, MicrobatchPool(torch.get_num_threads()) as pool:
        settings = TextConfig.of({"data": data, "context": length, "batch_tokens": length})
        rows_of = task.rows(text.file, settings, text.tokenizer, spec)
        scored = f"{rows_of.targets(limit)} tokens" if isinstance(rows_of, Rows) else "masked tokens"
        with progress(f"evaluating {scored} in rows of {length}") as advance:
            found = evaluation.evaluate(found_model, rows_of, limit=limit, pool=pool, progress=advance)
    _check_finite(found.loss, found_model, str(source.path))
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
