"""`headway diff A B`: the differences between two models, in words and numbers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headway.cli import offered
from headway.cli._options import Count, says
from headway.cli._shared import note, print_report
from headway.errors import ConfigError, did_you_mean
from headway.report import table

if TYPE_CHECKING:
    from headway.models import ModelSpec
    from headway.models.cost import Kept
    from headway.models.difference import Difference, Number

    Entry = tuple[ModelSpec, Kept | None]

DEPTH, VOCAB = 12, 32000


def command(
    first: Annotated[str, says(metavar="A")],
    second: Annotated[str, says(metavar="B")],
    *,
    context: Count | None = None,
    ladder: bool = False,
    steps: Count | None = None,
    seeds: Annotated[int | None, says(min=2)] = None,
    json: bool = False,
) -> None:
    """Show the differences between two models: the fields of their specs in words; weights, caches and operations in
    numbers.

    No weights are loaded or downloaded. A family takes the width, depth and heads of the other model; two families are
    compared at 12 layers of width 768. With --ladder, the models between them are trained on Python's own source, and
    each change of the loss is reported, with whether it exceeds its spread.

    first: a size of the catalog, a family, or a model's folder or Hub id
    second: the other one
    context: tokens per row [default: the shorter trained context]
    ladder: train the models between them, one difference at a time, in toy sizes
    steps: steps of each training [default: 200]
    seeds: trainings of each model [default: 3]
    """
    from headway.models.difference import Difference, differences, numbers

    if not ladder and (steps, seeds) != (None, None):
        raise ConfigError("diff: --steps and --seeds are only for --ladder; give it, or leave them out")
    specs, stored = find_pair(first, second)
    tokens = min(spec.trained_context for spec in specs) if context is None else context
    words, counts = differences(*specs), numbers(*specs, tokens, stored)
    if len({*map(str, stored)}) > 1:
        words = (*words, Difference("weights", *map(str, stored)))
    report = {
        "first": first,
        "second": second,
        "context": tokens,
        "weights": [*map(str, stored)],
        "differences": [difference._asdict() for difference in words],
        "numbers": [{**number._asdict(), "ratio": number.ratio} for number in counts],
    }
    text = to_text((first, second), tokens, words, counts)
    if ladder:
        trained = offered("ladder")(*specs, steps, seeds, note)
        report["ladder"] = trained.to_json()
        text = f"{text}\n\n{trained.to_text()}"
    print_report(report, text, json)


def find_pair(first: str, second: str) -> "tuple[tuple[ModelSpec, ModelSpec], tuple[Kept, Kept]]":
    """Returns the specs of two models, where a family takes the sizes of the other model or of `ModelSpec.of_depth`;
    and how each stores its weights: a model without a file in the dtype of the other, or in bfloat16 if neither has a
    file.

    Raises ConfigError for a name that is neither a folder, a size nor a family."""
    from headway.models import ModelSpec
    from headway.models.difference import BF16

    entries = find(first), find(second)
    like = next((entry[0] for entry in entries if entry is not None), ModelSpec.of_depth(DEPTH, VOCAB))
    a, b = (
        entry[0] if entry is not None else of_family(name, like)
        for name, entry in zip((first, second), entries, strict=True)
    )
    stored = [None if entry is None else entry[1] for entry in entries]
    usual = BF16._replace(dtype=next((kept.dtype for kept in stored if kept is not None), BF16.dtype))
    return (a, b), (stored[0] or usual, stored[1] or usual)


def find(name: str) -> "Entry | None":
    """Returns the spec and storage of a folder, a GGUF file, or a size of the catalog (whose storage is None); None for
    a family, which has no sizes."""
    from headway.cli.plan import find_model
    from headway.models import FAMILIES, catalog

    known = catalog.names()
    if name.lower() in known or Path(name).exists() or "/" in name:
        return find_model(name)
    if name not in FAMILIES:
        raise ConfigError(
            f"diff: {name!r} is not a folder, a size or a family{did_you_mean(name, [*FAMILIES, *known])}; "
            "`headway models` lists sizes and families"
        )
    return None


def of_family(name: str, like: "ModelSpec") -> "ModelSpec":
    """Returns a model of a family with the width, depth, heads and vocabulary of another model."""
    from headway.models import ModelSpec
    from headway.models.families import find_family

    kind = find_family(name)
    return ModelSpec.of(
        name,
        vocab=like.vocab,
        width=like.width,
        layers=like.layers,
        heads=like.heads,
        kv_heads=kind.kv_heads(like.heads, 1 if like.heads % 2 else 2),
        head_dim=like.head_dim,
        hidden=kind.hidden(like.width),
    )


def to_text(
    names: tuple[str, str], context: int, words: "tuple[Difference, ...]", counts: "tuple[Number, ...]"
) -> str:
    """Returns the report for a terminal; each difference takes three lines, since its texts are long."""
    if not words:
        return f"{names[0]} and {names[1]} are the same model but for their weights"
    wide = max(map(len, names))
    lines = [
        f"{row.aspect}\n  {names[0]:<{wide}}  {row.first}\n  {names[1]:<{wide}}  {row.second}"
        for row in words
    ]
    cells = [(row.name, row.first, row.second, row.ratio) for row in counts]
    return "\n".join(
        (*lines, "", table((f"in rows of {context:,} tokens", *names, "ratio"), cells, indent=""))
    )
