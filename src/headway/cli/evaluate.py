"""`headway eval MODEL --data DATA [--task TASK] | --harness TASKS`: how well a model predicts a text, does what it was
trained to do, or does tasks of lm-evaluation-harness."""

from pathlib import Path
from typing import Annotated, Any

from headway.cli._evaluation import print_evaluation
from headway.cli._options import Count, Model, Whole, says
from headway.cli._shared import note, print_report, set_threads
from headway.errors import ConfigError
from headway.report import table


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
    """Bits per byte, perplexity and loss by position of a model on a text; of an encoder, loss and accuracy on masked
    tokens, under one mask for good, or what its head scores on records (accuracy, F1, exact match; of a classifier the
    confusion matrix too). With --task chat the loss of answers, with --task preference the share of pairs that are
    ranked right, and what other training measures. With --harness, what lm-evaluation-harness finds for its tasks.

    settings: settings of the task, as in training (too_long=cut)
    data: text file, records with a "text" each (.jsonl, .json, .csv, .tsv), folder of .txt and .jsonl files,
        or token file (.tokens); of other tasks their records
    task: measure as training of this task measures held-out data: causal-lm, masked-lm, translation, chat,
        preference, classify, tag, answer, embed [default: what the model shows: its head, or text]
    harness: tasks of lm-evaluation-harness, instead of a text
    tasks: folder of YAML files with harness tasks of your own
    shots: solved examples before each document of a task [default: the task's]
    chat: documents of tasks go through the chat template
    batch_size: rows of a task computed at once; changes no result [default: 32]
    limit: only the first N tokens of the text, N of the records (drawn by a fixed seed), or N documents of
        each task
    """
    own = [f"{name}=" for name, value in (("data", data), ("context", context)) if value is not None]
    if twice := [item for item in settings or () if item.startswith(tuple(own))]:
        raise ConfigError(f"{twice[0]} is given as an option too; give it once")
    if (data is None and not settings) == (harness is None):
        raise ConfigError("eval needs a text (--data FILE) or tasks (--harness TASK[,TASK]), one of them")
    set_threads(threads)
    from headway.storage.dtypes import named_dtype

    kind = named_dtype(dtype)
    if harness is not None:
        if task is not None or settings:
            raise ConfigError("--task and KEY=VALUE are of headway's own tasks, not of --harness")
        try:
            from headway.integrations import lm_eval
        except ImportError as error:
            raise ConfigError(str(error)) from None
        from headway.api import load

        how: Any = {"dtype": kind, "backend": backend, "adapter": adapter or [], "any_base": any_base}
        lm = load(model, task="causal-lm", **how)
        found = lm_eval.evaluate(
            lm, harness.split(","), folder=None if tasks is None else str(tasks), limit=limit, shots=shots,
            context=context, batch_size=batch_size or 32, chat=chat,
        )  # fmt: skip
        print_harness(str(model), found, json)
        return
    if chat or any(given is not None for given in (tasks, shots, batch_size)):
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


def print_harness(model: str, found: dict[str, Any], json: bool) -> None:
    """Print what lm-evaluation-harness has found."""
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
