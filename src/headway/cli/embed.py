"""`headway embed MODEL [TEXT]...`: one vector for each text."""

from typing import Annotated

import typer

from headway.cli._options import TextsRun, TruncateOption, with_options
from headway.cli._shared import print_json
from headway.report import table


@with_options
def command(
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
    from headway.similarity import normalize

    embedder = run.load("embed", pool=pool, unit=unit)
    given = run.read()
    vectors = embedder.embed(given, batch_size=run.batch_size, cut=cut).double()
    if similarity:
        unit_vectors = normalize(vectors)
        cosines = (unit_vectors @ unit_vectors.T).tolist()
        if run.json:
            print_json({"texts": given, "cosines": cosines})
            return
        numbers = range(1, len(given) + 1)
        rows = [
            (i, *(f"{c:.4f}" for c in row), text)
            for i, row, text in zip(numbers, cosines, given, strict=True)
        ]
        print(table(("", *map(str, numbers), "text"), rows))
        return
    if run.json:
        print_json({"texts": given, "head": embedder.spec.head, "vectors": vectors.tolist()})
        return
    for vector in vectors.tolist():
        print(" ".join(f"{x:.6g}" for x in vector))
