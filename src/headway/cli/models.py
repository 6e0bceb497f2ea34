"""`headway models`: the published sizes by name, and how Chinese encoders compare."""

from headway.cli._options import JsonOption
from headway.cli._shared import print_json
from headway.report import table


def command(json: JsonOption = False) -> None:
    """The catalog: what each model is, and how many parameters it has. Nothing is loaded or downloaded.

    Its names are what `headway plan` and `headway train --model` take. The first table is the comparison of Su et al.
    2021 (RoFormer), section 4.5: unit of a token x kind of position.
    """
    from headway.models.overview import COMPARED, Row, rows

    compared = [Row.of(name) for name in COMPARED]
    if json:
        print_json({"compared": compared, "models": rows()})
        return
    print("Chinese encoders, as the paper of RoFormer compares them\n")
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
