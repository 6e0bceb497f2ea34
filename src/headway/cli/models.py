"""`headway models`: the families, the published sizes by name, and how Chinese encoders compare."""

from collections.abc import Mapping, Sequence

from headway.cli._shared import JsonOption, print_report
from headway.report import table


def command(json: JsonOption = False) -> None:
    """The families and the catalog: what each model is, and how many parameters it has. Nothing is loaded.

    Families are what `headway train --family` takes; their folders are those of the `model_type` in transformers. Names
    of the catalog are what `headway plan` and `headway train --model` take. One table is the comparison of Su et al.
    2021 (RoFormer), section 4.5: unit of a token x kind of position.
    """
    from headway.checkpoints.hf.layouts import family_rows
    from headway.models import catalog
    from headway.models.overview import COMPARED, row

    families = [family._asdict() for family in family_rows()]
    compared, models = [row(name) for name in COMPARED], [row(name) for name in catalog.names()]
    own = ("family", "model_type", "about")
    paper = ("name", "family", "tokens", "positions", "vocab", "context")
    sizes = ("name", "kind", "positions", "parameters", "layers", "width", "heads", "kv_heads", "hidden", "vocab",
             "context")  # fmt: skip
    parts = [
        "Families",
        _table(families, own, about="what it is"),
        "Chinese encoders, as the paper of RoFormer compares them",
        _table(compared, paper, name="model"),
        "Sizes: parameters are those of the module, a tied output layer counted once",
        _table(models, sizes, name="model", kv_heads="kv heads"),
    ]
    report = {"families": families, "compared": compared, "models": models}
    print_report(report, "\n\n".join(parts), json)


def _table(rows: Sequence[Mapping[str, object]], attributes: Sequence[str], **titles: str) -> str:
    """A row for each of `rows`, a column for each attribute, under its name or its title."""
    cells = [[row[name] for name in attributes] for row in rows]
    return table([titles.get(name, name) for name in attributes], cells)
