"""`headway fill-mask | classify | answer | embed | translate | eval MODEL ...`: what models make of texts."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli._shared import (
    BackendOption,
    BatchRun,
    JsonOption,
    LimitOption,
    RowOption,
    TextsRun,
    ThreadsOption,
    TruncateOption,
    attributes,
    note,
    print_report,
    read_prompt,
    set_threads,
    with_options,
)
from headway.errors import ConfigError, DataError
from headway.report import table


@with_options
def fill_mask(
    run: TextsRun,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="number of words for each mask")] = 5,
) -> None:
    """Find words for the masked places of texts ("Paris is the [MASK] of France."), with their probabilities.

    The mask is written as the model's tokenizer writes it: [MASK] in BERT's, <mask> in RoBERTa's."""
    filler, given = run.load(task="fill-mask"), run.read()
    found = filler.fill_mask(given, top_k=top_k, batch_size=run.batch_size)
    lines = []
    for text, masks in zip(given, found, strict=True):
        rows = [
            (place, one.text, one.piece, f"{one.probability:.4f}")
            for place, candidates in enumerate(masks, 1)
            for one in candidates
        ]
        lines += [text, table(("mask", "word", "piece", "probability"), rows)]
    print_report(_by_text(given, "masks", found), "\n".join(lines), run.json)


@with_options
def classify(
    run: TextsRun,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="each line is two texts with a tab between them")
    ] = False,
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=1, help="number of labels of each text [default: all]")
    ] = None,
    cut: TruncateOption = False,
) -> None:
    """Label texts with their probabilities; with a model that labels tokens, the spans that it labels."""
    labeller = run.load()
    from headway.api import Classifier, Tagger
    from headway.api.loading import wrong_task

    if not isinstance(labeller, Classifier | Tagger):
        raise wrong_task(run.model, labeller.spec, "classify")
    given = run.read()
    if isinstance(labeller, Tagger):
        if pairs or cut or top_k is not None:
            raise typer.BadParameter(
                "this model labels tokens: --pairs, --cut and --top-k are for labels of texts"
            )
        spans = labeller.tag(given, batch_size=run.batch_size)
        rows = [
            (i, f"{one.start}:{one.end}", one.label, f"{one.probability:.4f}", one.text)
            for i, own in enumerate(spans, 1)
            for one in own
        ]
        report = table(("text", "place", "label", "probability", "covers"), rows)
        print_report(_by_text(given, "spans", spans), report, run.json)
        return
    both = [_pair(i, line) for i, line in enumerate(given, 1)] if pairs else given
    found = labeller.classify(both, top_k=top_k, cut=cut, batch_size=run.batch_size)
    labels = [
        (text, one.label, f"{one.probability:.4f}")
        for text, own in zip(given, found, strict=True)
        for one in own
    ]
    print_report(_by_text(given, "labels", found), table(("text", "label", "probability"), labels), run.json)


@with_options
def answer(
    run: BatchRun,
    question: Annotated[str, typer.Argument(metavar="QUESTION")],
    context: Annotated[
        str | None, typer.Argument(metavar="CONTEXT", help="the text; from standard input when missing")
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="number of answers")] = 1,
    longest: Annotated[int, typer.Option("--longest", min=1, help="most tokens of an answer")] = 30,
    stride: Annotated[
        int, typer.Option("--stride", min=1, help="tokens from one window of a long text to the next")
    ] = 128,
    no_answer: Annotated[
        float | None,
        typer.Option(
            "--no-answer",
            metavar="THRESHOLD",
            help="also consider that there is no answer: it precedes the answers whose scores do not exceed its "
            "own by THRESHOLD, a difference of logits (0 is even) [default: there is an answer]",
        ),
    ] = None,
) -> None:
    """Find the answer to a question in a text, with its place and probability."""
    answerer = run.load(task="answer")
    text = read_prompt() if context is None or context == "-" else context
    limits = {"longest": longest, "stride": stride, "no_answer": no_answer, "batch_size": run.batch_size}
    found = answerer.answer(question, text, top_k=top_k, **limits)
    rows = [
        (f"{one.start}:{one.end}" if one.text else "-", f"{one.probability:.4f}", one.text or "no answer")
        for one in found
    ]
    report = table(("place", "probability", "answer"), rows)
    print_report({"question": question, "answers": found}, report, run.json)


@with_options
def embed(
    run: TextsRun,
    pool: Annotated[
        str | None,
        typer.Option("--pool", help="first | mean, over a text's tokens [default: the folder's, or mean]"),
    ] = None,
    unit: Annotated[
        bool | None,
        typer.Option("--unit/--no-unit", help="vectors of length 1 [default: the folder's, or no]"),
    ] = None,
    similarity: Annotated[
        bool, typer.Option("--similarity", help="print the cosines between the texts instead of vectors")
    ] = False,
    cut: TruncateOption = False,
) -> None:
    """Print one vector for each text, its numbers on one line, from any encoder."""
    if pool not in (None, "first", "mean"):
        raise typer.BadParameter(f'--pool is first or mean, got "{pool}"')
    embedder, given = run.load(task="embed", pool=pool, unit=unit), run.read()
    vectors = embedder.embed(given, batch_size=run.batch_size, cut=cut).double()
    if similarity:
        from headway.similarity import normalize

        unit_vectors = normalize(vectors)
        cosines = (unit_vectors @ unit_vectors.T).tolist()
        rows = [
            (i, *(f"{c:.4f}" for c in row), text)
            for i, (row, text) in enumerate(zip(cosines, given, strict=True), 1)
        ]
        columns = ("", *map(str, range(1, len(given) + 1)), "text")
        print_report({"texts": given, "cosines": cosines}, table(columns, rows), run.json)
        return
    lines = [" ".join(f"{x:.6g}" for x in vector) for vector in vectors.tolist()]
    print_report({"texts": given, "head": embedder.spec.head, "vectors": vectors}, "\n".join(lines), run.json)


@with_options
def translate(
    run: TextsRun,
    beams: Annotated[
        int, typer.Option("--beams", min=1, help="texts that are followed at once; 1 is greedy")
    ] = 4,
    length_penalty: Annotated[
        float,
        typer.Option(
            "--length-penalty", help="score = log probability / length^this; more favours long texts"
        ),
    ] = 1.0,
    n_best: Annotated[
        int,
        typer.Option("--n-best", min=1, help="translations of each text, the best first, with their scores"),
    ] = 1,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", "-n", min=1, help="at most so many [default: 128, or the context]"),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option("--reference", help="right translations, one a line: BLEU is printed instead of texts"),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="write the translations to this file")] = None,
) -> None:
    """Translate texts with an encoder-decoder. Translations go to stdout, one a line, what it took to stderr."""
    if n_best > beams:
        raise typer.BadParameter(f"--n-best {n_best} needs as many --beams, which are {beams}")
    translator = run.load(task="translate")
    from headway.api.translator import bleu
    from headway.checkpoints import atomic_write
    from headway.data.pairs import read_lines

    given = run.read()
    wanted = read_lines(reference) if reference is not None else None
    if wanted is not None and len(wanted) != len(given):
        raise typer.BadParameter(f"{reference} has {len(wanted)} lines for {len(given)} texts")
    begun = time.perf_counter()
    found = translator.translate(
        given, beams=beams, length_penalty=length_penalty, n_best=n_best, max_new_tokens=max_new_tokens,
        batch_size=run.batch_size,
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    best = [one.text for one in found]
    score = bleu(best, wanted) if wanted is not None else None
    if out is not None:
        atomic_write(out, "".join(f"{' '.join(text.splitlines())}\n" for text in best))
    mean = sum(one.score or 0.0 for one in found) / len(found)
    rows = [
        {
            "text": text,
            "translation": one.text,
            "finish_reason": one.finish_reason,
            "hypotheses": [attributes(other, "text", "score") for other in one.hypotheses],
        }
        for text, one in zip(given, found, strict=True)
    ]
    report = {"translations": rows, "mean_score": mean, "bleu": score, "seconds": seconds}
    shown = best if n_best == 1 else [f"{t.score:.4f}\t{t.text}" for one in found for t in one.hypotheses]
    print_report(report, "\n".join(shown) if score is None else str(score), run.json)
    if not run.json:
        note(f"{len(given)} texts, {beams} beams, mean score {mean:.4f}, {seconds:.1f} s")


def evaluate(
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


def _by_text(texts: list[str], name: str, found: list[list[Any]]) -> list[dict[str, Any]]:
    return [{"text": text, name: own} for text, own in zip(texts, found, strict=True)]


def _pair(number: int, line: str) -> tuple[str, str]:
    first, tab, second = line.partition("\t")
    if not tab:
        raise DataError(f"text {number} has no tab between the two texts of a pair")
    return first, second
