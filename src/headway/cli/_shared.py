"""What several commands have: arguments and options, each stated once; how torch is started, texts are read and reports
are printed. Imports nothing heavy.

A command whose first parameter is a dataclass of arguments and options has these, besides its own:

    @with_options
    def command(run: TextsRun, top_k: Annotated[int, typer.Option("--top-k")] = 5) -> None: ...
"""

import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.models import ArgumentInfo

from headway.errors import DataError
from headway.report import plain
from headway.threads import MOST_THREADS


def folder_of(text: str) -> Path:
    """The path of a model that is typed: what is there, or what an id of the Hub is fetched to."""
    path: Path = at_home(Path(text))
    if "/" not in text or path.exists():
        return path
    from headway.checkpoints.remote import local_model
    from headway.errors import HeadwayError

    try:
        return local_model(text)
    except HeadwayError as error:
        raise typer.BadParameter(str(error)) from error


def at_home(value: Any) -> Any:
    """A path, or each of a list, with the home folder in place of a first part "~", which shells leave in
    `--out=~/x`; other values as they are."""
    if isinstance(value, list | tuple):
        return type(value)(map(at_home, value))
    return value.expanduser() if isinstance(value, Path) and value.parts[:1] == ("~",) else value


@dataclass(frozen=True)
class _AtHome:
    """What a command calls, given its paths by `at_home`."""

    callback: Callable[..., Any]

    def __call__(self, *args: Any, **given: Any) -> Any:
        return self.callback(*args, **{name: at_home(value) for name, value in given.items()})


def expand_home(command: Any) -> None:
    """Have a click command, or those of a group, take every path by `at_home`."""
    for one in getattr(command, "commands", {}).values():
        expand_home(one)
    callback = getattr(command, "callback", None)
    if callback is not None and not isinstance(callback, _AtHome):
        command.callback = _AtHome(callback)


MODEL = "a model folder, a GGUF file, or an id of the Hugging Face Hub"

FolderArgument = Annotated[Path, typer.Argument(metavar="MODEL", parser=folder_of, help=MODEL)]
TargetArgument = Annotated[Path, typer.Argument(help="folder to write")]
JsonOption = Annotated[bool, typer.Option("--json", help="print the report as JSON on stdout")]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, max=MOST_THREADS, envvar="HEADWAY_THREADS", help="CPU threads [default: torch's]"
    ),
]
BackendOption = Annotated[
    str,
    typer.Option(
        "--backend", envvar="HEADWAY_BACKEND", help="attention backend; fails rather than falls back"
    ),
]
KvCacheOption = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype", help="auto | int8: what caches store; int8 is rounded, half of bfloat16"
    ),
]

DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="float32 (fp32) | bfloat16 (bf16) | ...: of weights and products; auto is the file's, float32 for float16",
    ),
]
AllowPickleOption = Annotated[bool, typer.Option("--allow-pickle", help="read pickles (weights only)")]
AdapterOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--adapter",
        parser=folder_of,
        metavar="FOLDER",
        help="an adapter (PEFT's), a folder or an id of the Hub; may be given often, they add up",
    ),
]
AnyBaseOption = Annotated[
    bool,
    typer.Option(
        "--any-base", help="take adapters that were trained beside other weights, or do not say which"
    ),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="replace the model in the target folder")]

TruncateOption = Annotated[
    bool, typer.Option("--cut", help="truncate texts that are too long; without it they are an error")
]
RowOption = Annotated[
    int | None,
    typer.Option("--context", min=2, help="tokens per row [default: the trained context, at most 2048]"),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, help="evaluate only the first N tokens of the text")
]


@dataclass(frozen=True, kw_only=True)
class ModelRun:
    """The model that a command runs, and how."""

    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help=MODEL),
    ]
    dtype: DtypeOption = "auto"
    adapter: AdapterOption = None
    any_base: AnyBaseOption = False
    compress: Annotated[
        bool,
        typer.Option(
            "--compress", help="keep bf16 weights in 11 bits, without loss: less memory, and faster decoding"
        ),
    ] = False
    dequantize: Annotated[
        bool,
        typer.Option(
            "--dequantize", help="plain weights in place of the codes of 4 to 8 bits that files hold"
        ),
    ] = False
    threads: ThreadsOption = None
    backend: BackendOption = "auto"

    def load(self, **more: Any) -> Any:
        """`headway.load` with these options, and more."""
        set_threads(self.threads)
        from headway.api import load

        how = attributes(self, "dtype", "backend", "compress", "dequantize")
        return load(self.model, adapter=self.adapter or (), any_base=self.any_base, **how, **more)


@dataclass(frozen=True, kw_only=True)
class BatchRun(ModelRun):
    """A model that reads rows in batches, and a report."""

    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="rows computed at once; changes no result")
    ] = 32
    json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class TextsRun(BatchRun):
    """A model that reads texts."""

    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="texts; from standard input, one a line, when there are none"),
    ] = None
    file: Annotated[Path | None, typer.Option("--file", help="texts, one a line (.gz may be read)")] = None

    def read(self) -> list[str]:
        """The texts of the arguments, of a file, or of standard input. Raises DataError when there are none."""
        if self.texts and self.file is not None:
            raise typer.BadParameter("texts are given twice, as arguments and as --file")
        if self.file is not None:
            from headway.data.pairs import read_lines

            return read_lines(self.file)
        if self.texts and self.texts != ["-"]:
            return self.texts
        if sys.stdin.isatty():
            note("texts, one a line, ended by Ctrl-D:")
        lines = [line for line in read_stdin().splitlines() if line.strip()]
        if not lines:
            raise DataError("no texts: give them as arguments, or one a line on standard input")
        return lines


def with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command: the fields of the function's first parameter, a dataclass of options, are the command's arguments
    and options, its arguments the first and its options the last."""
    first, *own = inspect.signature(function).parameters.values()
    group = inspect.signature(first.annotation).parameters

    def command(**given: Any) -> Any:
        return function(first.annotation(**{name: given.pop(name) for name in group}), **given)

    arguments = [p for p in (*group.values(), *own) if _is_argument(p)]
    options = [p for p in (*own, *group.values()) if not _is_argument(p)]
    return with_parameters(command, [*arguments, *options], function)


def with_parameters(
    command: Callable[..., Any], parameters: Sequence[inspect.Parameter], function: Callable[..., Any]
) -> Callable[..., Any]:
    """`command(**given)` as typer reads it: with these parameters, and the name and help text of `function`."""
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in keywords}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


def _is_argument(parameter: inspect.Parameter) -> bool:
    return any(isinstance(item, ArgumentInfo) for item in get_args(parameter.annotation))


def application(group: str | None = None) -> typer.Typer:
    """A typer application in the one style; with `group`, the help of a command that has commands of its own."""
    return typer.Typer(
        add_completion=False,
        no_args_is_help=group is not None,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
        help=group,
    )


def set_threads(threads: int | None) -> None:
    """Use `threads` CPU threads in torch; None leaves what torch chose."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def share_cores() -> None:
    """Let waiting OpenMP threads sleep early. Call it before torch is imported; a variable that is set in the
    environment takes precedence.

    OpenMP's threads spin for about a millisecond at every barrier. Where other programs run on the same
    cores, they spin away the time slices that they wait for: measured on 2 busy cores, a small model trains
    2 to 4 times slower for it."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def read_stdin(read: Callable[[], str] | None = None) -> str:
    """The whole of standard input, or what `read` reads of it. Raises DataError unless it is UTF-8."""
    text = (read or sys.stdin.read)()
    try:
        text.encode()  # a byte that is no UTF-8 is a lone surrogate here: see `headway.cli.main`
    except UnicodeEncodeError as error:
        at = len(text[: error.start].encode())
        raise DataError(f"standard input: not UTF-8 at byte {at}") from None
    return text


def read_prompt() -> str:
    """The prompt from standard input, without the line end that `echo` adds."""
    if sys.stdin.isatty():
        note("the prompt, ended by Ctrl-D:")
    return read_stdin().removesuffix("\n")


def attributes(value: object, *names: str) -> dict[str, Any]:
    """These attributes of a value by name, as a report has them."""
    return {name: getattr(value, name) for name in names}


def note(message: str) -> None:
    """Print progress or a remark on stderr, so that stdout stays a result that can be piped."""
    print(message, file=sys.stderr, flush=True)


def print_report(value: Any, text: str, json: bool) -> None:
    """Print a report on stdout: as one JSON document (see `print_json`), or as `text`."""
    if json:
        print_json(value)
    else:
        print(text)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout. Dataclasses, paths, tuples and numpy or torch numbers are converted;
    infinity and NaN, which JSON lacks, become null."""
    print(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False))
