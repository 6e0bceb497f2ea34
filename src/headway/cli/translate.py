"""`headway translate MODEL TEXT...`: translates texts, or computes their BLEU."""

import time
from pathlib import Path
from typing import Annotated

import typer

from headway.cli._options import Count, says
from headway.cli._shared import TextsRun, attributes, note, print_report, progress


def command(
    run: TextsRun,
    *,
    beams: Count = 4,
    length_penalty: float = 1.0,
    n_best: Count = 1,
    max_new_tokens: Annotated[Count | None, says(short="-n")] = None,
    reference: Path | None = None,
    prefix: str = "",
    source_language: str | None = None,
    target_language: str | None = None,
    out: Path | None = None,
) -> None:
    """Translate texts with an encoder-decoder. Translations go to stdout, one per line, statistics to stderr.

    beams: number of beams; 1 is greedy
    length_penalty: score = log probability / length^this; more favours long texts
    n_best: translations per text, the best first, with their scores
    max_new_tokens: maximum number of new tokens [default: 128, or the context]
    reference: reference translations, one per line: print BLEU instead of the translations
    prefix: text with which every translation begins
    source_language: language of the texts, as the tokenizer names it: en_XX, eng_Latn, en [default: the folder's]
    target_language: language of the translations [default: the folder's]
    out: file to which the translations are written
    """
    if n_best > beams:
        raise typer.BadParameter(
            f"--n-best {n_best} is more than --beams {beams}; give at least as many beams"
        )
    translator = run.load(task="translation")
    from headway.api.translator import bleu
    from headway.data.pairs import read_lines
    from headway.storage.files import atomic_write

    texts = run.read()
    references = read_lines(reference) if reference is not None else None
    if references is not None and len(references) != len(texts):
        raise typer.BadParameter(f"{reference} has {len(references)} lines for {len(texts)} texts")
    begun = time.perf_counter()
    with progress(f"translating {len(texts)} texts", only_on_terminals=True):
        results = translator.translate(
            texts, beams=beams, length_penalty=length_penalty, n_best=n_best, max_new_tokens=max_new_tokens,
            prefix=prefix, batch_size=run.batch_size, source_language=source_language, target_language=target_language,
        )  # fmt: skip
    seconds = time.perf_counter() - begun
    best = [result.text for result in results]
    score = bleu(best, references) if references is not None else None
    if out is not None:
        atomic_write(out, "".join(f"{' '.join(text.splitlines())}\n" for text in best))
    mean = sum(result.score or 0.0 for result in results) / len(results)
    rows = [
        {
            "text": text,
            "translation": result.text,
            "finish_reason": result.finish_reason,
            "hypotheses": [attributes(hypothesis, "text", "score") for hypothesis in result.hypotheses],
        }
        for text, result in zip(texts, results, strict=True)
    ]
    report = {"translations": rows, "mean_score": mean, "bleu": score, "seconds": seconds}
    shown = (
        best if n_best == 1 else [f"{t.score:.4f}\t{t.text}" for result in results for t in result.hypotheses]
    )
    print_report(report, "\n".join(shown) if score is None else str(score), run.json)
    if not run.json:
        note(f"{len(texts)} texts, {beams} beams, mean score {mean:.4f}, {seconds:.1f} s")
