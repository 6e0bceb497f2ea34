"""`headway models`: the families, the published sizes by name, and how Chinese encoders compare."""

from headway.cli._options import JsonOption
from headway.cli._shared import print_json
from headway.report import table


def command(json: JsonOption = False) -> None:
    """The families and the catalog: what each model is, and how many parameters it has. Nothing is loaded.

    Families are what `headway train --family` takes; their folders are those of the `model_type` in transformers. Names
    of the catalog are what `headway plan` and `headway train --model` take. One table is the comparison of Su et al.
    2021 (RoFormer), section 4.5: unit of a token x kind of position.
    """
    from headway.checkpoints.hf.layouts import family_rows
    from headway.models.overview import COMPARED, Row, rows

    compared = [Row.of(name) for name in COMPARED]
    if json:
        families = [row._asdict() for row in family_rows()]
        print_json({"families": families, "compared": compared, "models": rows()})
        return
    print("Families\n")
    print(
        table(
            ("family", "model_type", "what it is"), [(r.family, r.model_type, r.about) for r in family_rows()]
        )
    )
    print("\nChinese encoders, as the paper of RoFormer compares them\n")
    print(
        table(
            ("model", "family", "tokens", "positions", "vocab", "context"),
            [(r.name, r.family, r.tokens, r.positions, r.vocab, r.context) for r in compared],
        )
    )
    print("\nSizes: parameters are those of the module, a tied output layer counted once\n")
    columns = "layers", "width", "heads", "kv_heads", "hidden", "vocab", "context"
    print(
        table(
            ("model", "kind", "positions", "parameters", *(c.replace("_", " ") for c in columns)),
            [
                (r.name, r.kind, r.positions, r.parameters, *(getattr(r, column) for column in columns))
                for r in rows()
            ],
        )
    )
