"""`headway eval MODEL --data TEXT`: how well a model predicts a text."""

from typing import Annotated

import typer

from headway.cli._shared import (
    BackendOption,
    JsonOption,
    LimitOption,
    RowOption,
    ThreadsOption,
    attributes,
    print_report,
    set_threads,
)
from headway.errors import ConfigError
from headway.report import table


def command(
    model: Annotated[str, typer.Argument(help="Hugging Face folder")],
    data: Annotated[
        str, typer.Option("--data", help="text file, folder of text files, or token file (.tokens)")
    ],
    context: RowOption = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto | bf16 | fp32: number format of weights and products")
    ] = "auto",
    limit: LimitOption = None,
    threads: ThreadsOption = None,
    backend: BackendOption = "auto",
    json: JsonOption = False,
) -> None:
    """Bits per byte, perplexity and loss by position of a model on a text; of an encoder, loss and accuracy on masked
    tokens, under one mask for good."""
    import torch

    from headway.checkpoints.folder import load_folder
    from headway.checkpoints.restore import build_model
    from headway.models import Decoder, Encoder
    from headway.surgery import Text
    from headway.train import evaluation
    from headway.train.microbatch_pool import DTYPES, MicrobatchPool, choose_precision
    from headway.train.tasks import text_task_of, text_tasks
    from headway.train.text_config import TextConfig

    if dtype not in ("auto", "bf16", "fp32", "fp16"):
        raise ConfigError(f"--dtype {dtype}: auto, bf16 and fp32 are known")
    set_threads(threads)
    precision = choose_precision(dtype)
    source = load_folder(model)
    spec, task = source.spec, text_tasks()[text_task_of(source.spec)]
    found_model = build_model(source, dtype=DTYPES[precision.what], backend=backend)
    assert isinstance(found_model, (Decoder, Encoder))
    length = context or min(spec.trained_context, 2048)
    with (
        Text.read(data, source, framed=task.in_template) as text,
        MicrobatchPool(torch.get_num_threads()) as pool,
    ):
        settings = TextConfig.of({"data": data, "context": length, "batch_tokens": length})
        rows_of = task.rows(text.file, settings, text.tokenizer, spec)
        found = evaluation.evaluate(found_model, rows_of, limit=limit, pool=pool)
    report = {
        "model": model,
        "data": data,
        "dtype": precision.what,
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
