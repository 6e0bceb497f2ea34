"""`headway train`: a run configured by flags, a YAML file, or a YAML file with key=value overrides. Name, type, help
text and unit of its options come from the fields of the settings."""

import inspect
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from headway.cli._options import Count, click_command, says, with_parameters
from headway.cli._shared import attributes, note, print_report
from headway.cores import limit_threads
from headway.errors import ConfigError, listed
from headway.report import cell, table
from headway.train import config_yaml
from headway.train.config import TrainConfig, extra
from headway.train.config_io import STAGES, read_config, read_yaml
from headway.train.tasks import settings_of, tasks_with

if TYPE_CHECKING:
    from headway.recipes import Recipe
    from headway.train import TrainResult

ENVIRONMENT = ("threads", "backend")  # HEADWAY_THREADS and HEADWAY_BACKEND, as in every command


def run(
    overrides: Annotated[list[str] | None, says(metavar="[KEY=VALUE]...")] = None,
    *,
    config: Path | None = None,
    resume: Annotated[str, says(metavar="never|auto|PATH")] = "never",
    small: bool = False,
    print_config: bool = False,
    processes: Count | None = None,
    dry_run: bool = False,
    json: bool = False,
    **flags: Any,
) -> int:
    """Train a model: a decoder to predict the next token of a text, an encoder to predict masked tokens, a translator
    on pairs of sentences (--task translation). Resumes bit for bit.

    overrides: settings, as in the YAML file
    config: YAML file of settings (those below, with _ for -)
    resume: auto: resume from the last checkpoint in --out, or start; PATH: resume from that checkpoint
    small: apply the settings under `small:` of the YAML file: a run in toy size
    print_config: print the resolved settings as YAML and stop
    processes: number of processes on this machine that share the run, started as by torchrun --nproc-per-node N -m
        headway train (docs/parallel.md) [default: those that torchrun started, or 1]
    dry_run: print model, counts, steps and memory, without training or writing anything
    """
    flags = {name: value for name, value in flags.items() if value is not None and value != []}
    environment = {name: os.environ.get(f"HEADWAY_{name.upper()}") for name in ENVIRONMENT}
    sources = overrides or (), flags, {name: value for name, value in environment.items() if value}
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if processes is not None and started not in (1, processes):
        raise ConfigError(
            f"--processes {processes}: {started} processes are started already (by torchrun); leave it out"
        )
    several = max(started, processes or 1) > 1
    if config is not None and STAGES in read_yaml(config):
        if print_config or dry_run:
            raise ConfigError(
                f"{config} is a recipe of several runs; --print-config and --dry-run are for one run"
            )
        if several:
            raise ConfigError(
                f"{config} is a recipe of several runs, which needs a single process; leave out "
                "--processes or torchrun"
            )
        from headway.recipes import read_recipe

        return _recipe(read_recipe(config, *sources, small=small), resume, json)
    settings = read_config(config, *sources, small=small)
    if print_config:
        print(config_yaml(settings), end="")
        return 0
    if dry_run:
        from headway.train.dry_run import describe_run

        plan = describe_run(settings)
        print_report(plan, plan.text(), json)
        return 0
    if several and started == 1:
        return start_processes(processes or 1, settings, resume)
    from headway.hardware import keep_freed_memory
    from headway.train import Interrupted, train
    from headway.train.start import resume_command

    is_main = os.environ.get("RANK", "0") == "0"
    keep_freed_memory()
    try:
        result = train(settings, resume=resume)
    except Interrupted as stop:
        if is_main:
            note(f"saved {stop.checkpoint}\nresume with: {resume_command(Path(settings.out), started)}")
        return 130
    if is_main:
        _print(result, json)
    return 0


def start_processes(count: int, settings: TrainConfig, resume: str) -> int:
    """Runs this command line in `count` processes started by torchrun, which share the CPU's threads. Returns the exit
    code of the first process that failed: it has printed the reason, unless a signal ended it.

    Raises ConfigError for invalid settings before anything is started."""
    import logging

    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from headway.train.start import checked, where_to_begin

    where_to_begin(checked(settings, count).config, resume)
    limit_threads(count)
    # the processes report their own errors
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    launcher = ("--standalone", f"--nproc-per-node={count}", "-m", "headway")
    try:
        torchrun.run(torchrun.parse_args([*launcher, *sys.argv[1:]]))
    except SignalException:
        return 130
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            note(f"rank {rank} was ended by signal {-failure.exitcode} ({failure.signal_name()})")
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


def _recipe(recipe: "Recipe", resume: str, json: bool) -> int:
    from headway.hardware import keep_freed_memory
    from headway.recipes import run_recipe
    from headway.train import Interrupted

    keep_freed_memory()
    try:
        report = run_recipe(recipe, resume=resume)
    except Interrupted as stop:
        note(f"saved {stop.checkpoint}\nresume with the same command and --resume auto")
        return 130
    print_report(report.plain(), report.text(), json)
    return 0


def _print(result: "TrainResult", json: bool) -> None:
    validation = result.validation
    words = {"loss": f"loss, nats per {result.unit}", "bits_per_byte": "bits per byte"}
    measures = {name: getattr(validation, name, None) for name in ("loss", "bits_per_byte", "accuracy")}
    measures |= {} if validation is None else validation.metrics
    columns = ("model", "metrics", "curve", "steps", "trained_tokens", "seconds", "loss", "accuracy")
    report = attributes(result, *columns) | {f"val_{name}": value for name, value in measures.items()}
    rows: list[tuple[str, object]] = [
        ("steps", result.steps),
        (f"trained {result.unit}s", result.trained_tokens),
        (f"loss of the last step, nats per {result.unit}", result.loss),
        *((f"held-out {words.get(name, name)}", v) for name, v in measures.items() if v is not None),
        ("model", str(result.model)),
        *([] if result.transformers is None else [("transformers", result.transformers)]),
        ("metrics", str(result.metrics)),
        *([] if result.curve is None else [("curve", str(result.curve))]),
    ]
    print_report(report, table(("what", "value"), rows) + f"\nnext: {result.next_command}", json)


class SettingsCommand:
    """The command `run` with options for the settings of a task: the one that --task, task=, or the file of --config
    names; by default training on text."""

    def make_context(self, name: str, arguments: list[str]) -> Any:
        """Returns the context of the command, like the method of click's commands."""
        task = asked_task(arguments)
        try:
            return click_command(with_flags(run, settings_of(task))).make_context(name, arguments)
        except Exception as error:
            option: str | None = getattr(error, "option_name", None)  # set if the option is unknown
            tasks = [] if option is None else tasks_with(option.removeprefix("--").replace("-", "_"))
            if not tasks:
                raise
            instead = "; --depth sets the layers of a home-made model" if option == "--layers" else ""
            raise ConfigError(
                f"{option} is an option of task {listed(tasks)}, but the task is {task or 'text'}; give "
                f"--task {tasks[0]}, or leave it out{instead}"
            ) from error


def asked_task(arguments: Sequence[str]) -> str | None:
    """Returns the task that the arguments of the command line name, or None."""
    values = dict(item.split("=", 1) for item in arguments if "=" in item)
    values |= {name: value for name, value in itertools.pairwise(arguments) if name in ("--task", "--config")}
    named = values.get("--task", values.get("task"))
    if named is None and "--config" in values:
        named = read_yaml(values["--config"]).get("task")
    return named


def with_flags(function: Callable[..., int], kind: type[TrainConfig]) -> Callable[..., int]:
    """Returns the function with an option for each field of `kind` in place of its `**flags`."""
    signature = inspect.signature(function, eval_str=True)
    fixed = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    both = [*fixed, *(_flag(name, field) for name, field in kind.grouped().items())]
    return with_parameters(
        lambda **kwargs: function(**kwargs), both, function.__name__, function.__doc__ or ""
    )


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    """Returns the option of a field; its value is None if it is not given."""
    kind: Any = next(
        (kind for kind in get_args(field.annotation) if kind is not type(None)), field.annotation
    )
    about, text = extra(field), field.description or ""
    if get_origin(field.annotation) is Literal:
        kind, text = str, f"{text} ({' | '.join(get_args(field.annotation))})"
    if get_origin(field.annotation) is tuple:
        kind, text = list[str], f"{text} (may be given several times)"
    if not field.is_required() and "[default:" not in text and field.default not in (None, ()):
        text += f" [default: {cell(field.default) if kind is bool else field.default}]"
    if name in ENVIRONMENT:
        text += f" [env: HEADWAY_{name.upper()}]"
    unit = str(about["unit"]).upper().replace(" ", "-") if "unit" in about else None
    detail = says(help=text, show_default=False, metavar=unit)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, detail]
    )


command = SettingsCommand()
