"""Turns functions into commands: a command's arguments and options are the parameters of its function.

    def command(run: ModelRun, question: str, *, top_k: Count = 5, json: bool = False) -> None:
        '''What the command does.

        question: help text of the argument
        top_k: help text of the option
        '''

Parameters before the * are arguments, those after it options (`--top-k`; for a bool whose default is None or True, also
`--no-top-k`). The help text of a parameter is in the docstring, or else in `COMMON`. If the first parameter is a
dataclass, its fields become parameters, with help texts in the dataclass's docstring. Imports nothing heavy.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer

from headway.report import described
from headway.threads import MOST_THREADS


def says(**detail: Any) -> tuple[tuple[str, Any], ...]:
    """Returns details of a parameter for its type: `Annotated[int, says(min=1)]`. They are arguments of `typer.Option`
    or `typer.Argument`; for options also flag, the name without --, and short, a second name."""
    return tuple(detail.items())


Count = Annotated[int, says(min=1)]
Whole = Annotated[int, says(min=0)]


def folder_of(text: str) -> Path:
    """Returns the path of a model given on the command line: an existing path, or the folder of a Hub id, which is
    downloaded."""
    path: Path = at_home(Path(text))
    if "/" not in text or path.exists():
        return path
    from headway.checkpoints.remote import local_model
    from headway.errors import HeadwayError

    try:
        return local_model(text)
    except HeadwayError as error:
        raise typer.BadParameter(str(error)) from error


MODEL = "a model folder, a GGUF file, or an id of the Hugging Face Hub"
Model = Annotated[Path, says(parser=folder_of, metavar="MODEL", help=MODEL)]

COMMON: Mapping[str, Mapping[str, Any]] = {
    "model": {"help": MODEL, "metavar": "MODEL"},
    "json": {"help": "print the report as JSON on stdout"},
    "threads": {
        "help": "CPU threads [default: torch's]",
        "min": 1,
        "max": MOST_THREADS,
        "envvar": "HEADWAY_THREADS",
    },
    "backend": {
        "help": "attention backend; an error if it cannot run, never a fallback",
        "envvar": "HEADWAY_BACKEND",
    },
    "kv_cache_dtype": {
        "help": "auto | int8: dtype of the KV cache; int8 rounds, and halves bfloat16's memory"
    },
    "dtype": {
        "help": "float32 (fp32) | bfloat16 (bf16) | ...: dtype of weights and products; auto is that of the file, "
        "float32 for float16"
    },
    "allow_pickle": {"help": "read pickles (weights only)"},
    "adapter": {
        "help": "a PEFT adapter, a folder or an id of the Hub; repeat it to add several",
        "parser": folder_of,
        "metavar": "FOLDER",
    },
    "any_base": {"help": "accept adapters that were trained on other weights, or do not say on which"},
    "overwrite": {"help": "replace the model in the target folder"},
    "cut": {"help": "truncate texts that are too long; without it they are an error"},
    "context": {"help": "tokens per row [default: the trained context, at most 2048]", "min": 2},
    "limit": {"help": "evaluate only the first N tokens of the text", "min": 1},
    "out": {"help": "folder to write"},
    "timeout": {
        "help": "retry a request after this long without an answer, up to 6 times [default: 600]",
        "min": 0.1,
        "metavar": "SECONDS",
    },
}


def at_home(value: Any) -> Any:
    """Returns a path, or a list of paths, with a leading "~" expanded (shells leave it alone in `--out=~/x`); other
    values unchanged."""
    if isinstance(value, list | tuple):
        return type(value)(map(at_home, value))
    return value.expanduser() if isinstance(value, Path) and value.parts[:1] == ("~",) else value


def click_command(function: Any) -> Any:
    """Returns the click command of a function; a click command, or anything like one, is returned as it is."""
    if hasattr(function, "make_context"):
        return function
    return typer.main.get_command(application(None, function))


def application(group: str | None, *functions: Callable[..., Any]) -> typer.Typer:
    """Returns a typer application with the common settings; with `group`, its help text, it is a command whose
    subcommands are `functions`."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=group is not None,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
        help=group,
    )
    for function in functions:
        app.command()(with_options(function))
    return app


def with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function in the form that typer reads, each parameter with its help text; "~" in paths is expanded."""
    about, helps = described(function)
    parameters = [*inspect.signature(function, eval_str=True).parameters.values()]
    group: Any = parameters[0].annotation if parameters and is_dataclass(parameters[0].annotation) else None
    fields: list[inspect.Parameter] = []
    if group is not None:
        fields = [*inspect.signature(group, eval_str=True).parameters.values()]
        for kind in group.__mro__:
            helps = {**described(kind)[1], **helps}

    def command(**kwargs: Any) -> Any:
        values = {name: at_home(value) for name, value in kwargs.items()}
        if group is None:
            return function(**values)
        return function(group(**{field.name: values.pop(field.name) for field in fields}), **values)

    parameters = parameters[group is not None :]
    arguments = [p for p in (*fields, *parameters) if p.kind is not p.KEYWORD_ONLY]
    options = [p for p in (*parameters, *fields) if p.kind is p.KEYWORD_ONLY]
    both = [declared(parameter, helps) for parameter in (*arguments, *options)]
    return with_parameters(command, both, function.__name__, about)


def with_parameters(
    command: Callable[..., Any], parameters: Sequence[inspect.Parameter], name: str, about: str
) -> Callable[..., Any]:
    """Sets the parameters, name and docstring of `command(**kwargs)`, and returns it."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__name__, command.__doc__ = name, about
    return command


def declared(parameter: inspect.Parameter, helps: Mapping[str, str]) -> inspect.Parameter:
    """Returns a parameter, keyword-only, with typer's description of it."""
    kind, detail = _parts(parameter.annotation)
    if parameter.name in helps:
        detail["help"] = helps[parameter.name]
    elif "help" not in detail:
        detail |= COMMON.get(parameter.name, {})
    if parameter.kind is parameter.KEYWORD_ONLY:
        flag = f"--{detail.pop('flag', parameter.name.replace('_', '-'))}"
        if kind in (bool, bool | None) and parameter.default is not False:
            flag = f"{flag}/--no-{flag[2:]}"
        short = [detail.pop("short")] if "short" in detail else []
        info: Any = typer.Option(flag, *short, **detail)
    else:
        info = typer.Argument(**detail)
    return parameter.replace(annotation=Annotated[kind, info], kind=parameter.KEYWORD_ONLY)


def _parts(annotation: Any) -> tuple[Any, dict[str, Any]]:
    """Splits a type into the plain type and the details that the type itself or one of its parts carries."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kind, detail = _parts(inner[0])
        return kind, {**detail, **dict(pair for pairs in inner[1:] for pair in pairs)}
    if origin not in (list, Union, UnionType):
        return annotation, {}
    parts = [_parts(part) for part in inner]
    kinds = [kind for kind, _ in parts]
    kind = list[kinds[0]] if origin is list else reduce(or_, kinds)  # type: ignore[valid-type]
    return kind, {name: value for _, detail in parts for name, value in detail.items()}
