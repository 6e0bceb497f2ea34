"""`headway fill-mask | classify | answer | embed MODEL ...`: tasks of encoders."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headway.cli._options import Count, says
from headway.cli._shared import BatchRun, TextsRun, note, print_report, progress, read_prompt
from headway.errors import DataError
from headway.report import table


def fill_mask(run: TextsRun, *, top_k: Count = 5) -> None:
    """Predict the masked words of texts ("Paris is the [MASK] of France."), with their probabilities.

    Write the mask as the model's tokenizer does: [MASK] for BERT, <mask> for RoBERTa.

    top_k: number of words per mask
    """
    filler, texts = run.load(task="masked-lm"), run.read()
    with _reading(len(texts)):
        predictions = filler.fill_mask(texts, top_k=top_k, batch_size=run.batch_size)
    lines = []
    for text, masks in zip(texts, predictions, strict=True):
        rows = [
            (place, word.text, word.piece, f"{word.probability:.4f}")
            for place, candidates in enumerate(masks, 1)
            for word in candidates
        ]
        lines += [text, table(("mask", "word", "piece", "probability"), rows)]
    print_report(_by_text(texts, "masks", predictions), "\n".join(lines), run.json)


def classify(
    run: TextsRun,
    *,
    pairs: bool = False,
    top_k: Count | None = None,
    cut: bool = False,
    csv: Path | None = None,
) -> None:
    """Label texts, with probabilities; with a model that labels tokens, label spans of texts.

    pairs: each line has two texts, separated by a tab
    top_k: number of labels per text [default: all]
    csv: write a CSV file instead of printing: a row per text, with its label and all probabilities
    """
    if csv is not None and (run.json or top_k is not None):
        raise typer.BadParameter("--csv writes all labels of each text; leave out --json and --top-k")
    labeller = run.load()
    from headway.api import Classifier, Tagger
    from headway.api.loading import wrong_task

    if not isinstance(labeller, Classifier | Tagger):
        raise wrong_task(run.model, labeller.spec, "classify")
    texts = run.read()
    if isinstance(labeller, Tagger):
        if pairs or cut or top_k is not None or csv is not None:
            raise typer.BadParameter(
                "this model labels tokens; --pairs, --cut, --top-k and --csv are only for models that label texts"
            )
        with _reading(len(texts)):
            spans = labeller.tag(texts, batch_size=run.batch_size)
        rows = [
            (i, f"{span.start}:{span.end}", span.label, f"{span.probability:.4f}", span.text)
            for i, ranked in enumerate(spans, 1)
            for span in ranked
        ]
        report = table(("text", "place", "label", "probability", "covers"), rows)
        print_report(_by_text(texts, "spans", spans), report, run.json)
        return
    both = [_pair(i, line) for i, line in enumerate(texts, 1)] if pairs else texts
    with _reading(len(texts)):
        predictions = labeller.classify(both, top_k=top_k, cut=cut, batch_size=run.batch_size)
    if csv is not None:
        _write_csv(csv, both, predictions, labeller.spec.head.labels)
        note(f"{csv}: {len(predictions)} texts")
        return
    labels = [
        (text, entry.label, f"{entry.probability:.4f}")
        for text, ranked in zip(texts, predictions, strict=True)
        for entry in ranked
    ]
    print_report(
        _by_text(texts, "labels", predictions), table(("text", "label", "probability"), labels), run.json
    )


def answer(
    run: BatchRun,
    question: Annotated[str, says(metavar="QUESTION")],
    context: Annotated[str | None, says(metavar="CONTEXT")] = None,
    *,
    top_k: Count = 1,
    longest: Count = 30,
    stride: Count = 128,
    no_answer: Annotated[float | None, says(metavar="THRESHOLD")] = None,
) -> None:
    """Find the answer to a question in a text, with its position and probability.

    context: the text; read from standard input if missing
    top_k: number of answers
    longest: maximum number of tokens of an answer
    stride: tokens from one window of a long text to the next
    no_answer: also consider that there is no answer: it ranks before the answers whose scores do not exceed its own by
        THRESHOLD, a difference of logits (0 is neutral) [default: there is an answer]
    """
    answerer = run.load(task="answer")
    text = read_prompt() if context is None or context == "-" else context
    limits = {"longest": longest, "stride": stride, "no_answer": no_answer, "batch_size": run.batch_size}
    with _reading(1):
        answers = answerer.answer(question, text, top_k=top_k, **limits)
    rows = [
        (
            f"{span.start}:{span.end}" if span.text else "-",
            f"{span.probability:.4f}",
            span.text or "no answer",
        )
        for span in answers
    ]
    report = table(("place", "probability", "answer"), rows)
    print_report({"question": question, "answers": answers}, report, run.json)


def embed(
    run: TextsRun,
    *,
    pool: Literal["first", "last", "mean"] | None = None,
    unit: bool | None = None,
    similarity: bool = False,
    cut: bool = False,
) -> None:
    """Print one embedding per text, its numbers on one line, from any encoder.

    pool: pooling over a text's tokens [default: the folder's, or mean]
    unit: normalize embeddings to length 1 [default: the folder's, or no]
    similarity: print the cosine similarities of the texts instead of embeddings
    """
    embedder, texts = run.load(task="embed", pool=pool, unit=unit), run.read()
    with _reading(len(texts)):
        vectors = embedder.embed(texts, batch_size=run.batch_size, cut=cut).double()
    if similarity:
        from headway.similarity import normalize

        unit_vectors = normalize(vectors)
        cosines = (unit_vectors @ unit_vectors.T).tolist()
        rows = [
            (i, *(f"{c:.4f}" for c in row), text)
            for i, (row, text) in enumerate(zip(cosines, texts, strict=True), 1)
        ]
        columns = ("", *map(str, range(1, len(texts) + 1)), "text")
        print_report({"texts": texts, "cosines": cosines}, table(columns, rows), run.json)
        return
    lines = [" ".join(f"{x:.6g}" for x in vector) for vector in vectors.tolist()]
    print_report({"texts": texts, "head": embedder.spec.head, "vectors": vectors}, "\n".join(lines), run.json)


def _by_text(texts: list[str], name: str, results: list[list[Any]]) -> list[dict[str, Any]]:
    return [{"text": text, name: result} for text, result in zip(texts, results, strict=True)]


def _write_csv(
    path: Path,
    texts: Sequence[str | tuple[str, str]],
    scores: Sequence[Sequence[Any]],
    labels: Sequence[str],
) -> None:
    """Writes columns text (for pairs text_a and text_b), label, and P(LABEL) for each label in the model's order."""
    import csv
    import io

    from headway.storage.files import atomic_write

    file, pairs = io.StringIO(), not isinstance(texts[0], str)
    writer = csv.writer(file, lineterminator="\n")
    names = ("text_a", "text_b") if pairs else ("text",)
    writer.writerow([*names, "label", *(f"P({label})" for label in labels)])
    for text, ranked in zip(texts, scores, strict=True):
        probabilities = {entry.label: entry.probability for entry in ranked}
        whole = (text,) if isinstance(text, str) else text
        writer.writerow([*whole, ranked[0].label, *(probabilities[label] for label in labels)])
    atomic_write(path, file.getvalue())


def _pair(number: int, line: str) -> tuple[str, str]:
    first, tab, second = line.partition("\t")
    if not tab:
        raise DataError(f"--pairs: text {number} has no tab between the two texts of a pair")
    return first, second


def _reading(texts: int) -> AbstractContextManager[Any]:
    return progress(f"reading {texts} text{'s' if texts > 1 else ''}", only_on_terminals=True)
