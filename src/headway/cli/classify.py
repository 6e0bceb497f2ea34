"""`headway classify MODEL [TEXT]...`: labels of texts, of pairs of texts, or of spans of texts."""

from typing import Annotated

import typer

from headway.cli._options import TextsRun, TruncateOption, with_options
from headway.cli._shared import print_json
from headway.errors import DataError
from headway.report import table


@with_options
def command(
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
    from headway.api import Classifier, Tagger
    from headway.api.loading import wrong_task

    labeller = run.load()
    if not isinstance(labeller, Classifier | Tagger):
        raise wrong_task(run.model, labeller.spec, "classify")
    given = run.read()
    if isinstance(labeller, Tagger):
        if pairs or cut or top_k is not None:
            raise typer.BadParameter(
                "this model labels tokens: --pairs, --cut and --top-k are for labels of texts"
            )
        spans = labeller.tag(given, batch_size=run.batch_size)
        if run.json:
            print_json([{"text": text, "spans": own} for text, own in zip(given, spans, strict=True)])
            return
        rows = [
            (i + 1, f"{one.start}:{one.end}", one.label, f"{one.probability:.4f}", one.text)
            for i, own in enumerate(spans)
            for one in own
        ]
        print(table(("text", "place", "label", "probability", "covers"), rows))
        return
    both = [_pair(i, line) for i, line in enumerate(given)] if pairs else given
    found = labeller.classify(both, top_k=top_k, cut=cut, batch_size=run.batch_size)
    if run.json:
        print_json([{"text": text, "labels": own} for text, own in zip(given, found, strict=True)])
        return
    labels = [
        (text, one.label, f"{one.probability:.4f}")
        for text, own in zip(given, found, strict=True)
        for one in own
    ]
    print(table(("text", "label", "probability"), labels))


def _pair(i: int, line: str) -> tuple[str, str]:
    first, tab, second = line.partition("\t")
    if not tab:
        raise DataError(f"text {i + 1} has no tab between the two texts of a pair")
    return first, second
