"""`headway inspect | models | tokenize`: facts about a checkpoint without loading it, the published sizes, and tokens
of a text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli._options import Model
from headway.cli._shared import print_report
from headway.report import cell, size, table

if TYPE_CHECKING:
    from headway.models import ModelSpec

TOLD = ("layers", "order", "norm", "feed-forward", "heads", "scores", "biases", "embedding")
"""The aspects of a spec that are printed in the words of `headway diff`."""


def command(folder: Model, *, allow_pickle: bool = False, json: bool = False) -> None:
    """Show a checkpoint's spec, rotary frequencies and pairing, patterns by layer, sizes, dtype, tokenizer and context.

    Reads the config and the headers of the weight files, and checks them against each other.
    """
    from headway.checkpoints import inspect

    report = inspect(folder, allow_pickle=allow_pickle)
    print_report({**report, "spec": _facts(report["spec"])}, text(report), json)


def text(report: Mapping[str, Any]) -> str:
    """Returns the report for a terminal."""
    from headway.models.description import ASPECTS

    spec, limit, unused = report["spec"], report["context_limit"], report["unused"]
    longest = "runs beyond it too" if limit is None else f"refuses more than {limit:,}"
    before = report["rotary"] and report["rotary"]["before_scaling"]
    scaled = "" if before is None else f" (before rotary scaling {before:,})"
    stored_as = "" if report["model_type"] == spec.family else f" (model_type {report['model_type']})"
    stacks = ", ".join(f"{name} {count:,}" for name, count in report["parameters"].items() if count)
    files = f"{len(report['files'])} file{'s' * (len(report['files']) > 1)}"
    tensors = ", ".join(f"{count} tensors {dtype}" for dtype, count in report["stored_dtypes"].items())
    patterns = (f"layers {layers}: {pattern}" for layers, pattern in report["patterns"])
    more = f", ... and {len(unused) - 6} more" if len(unused) > 6 else ""
    ends = (
        f"{k.removesuffix('_token_id')} {v}"
        for k, v in report["generation"].items()
        if k.endswith("_token_id")
    )
    encoders = [] if spec.encoder is None else [spec.encoder]
    facts = [
        ("family", f"{spec.family}{stored_as}; transformers {report['transformers']}"),
        ("kind", f"{report['kind']}; gives {report['gives']}"),
        ("parameters", f"{report['parameter_count']:,} ({stacks})"),
        ("stored", f"{size(report['stored_bytes'])} in {files}: {tensors}"),
        *([("weights", report["weights"])] if report["weights"] is not None else []),
        ("runs in", report["runs_in"]),
        *((name, ASPECTS[name].words(spec)) for name in TOLD),
        ("context", f"{spec.trained_context:,} tokens{scaled}; {longest}"),
        ("keys, values", _kept(report)),
        ("patterns", f"\n{' ' * 17}".join(patterns)),
        *(
            ("encoder", ASPECTS[name].words(inner))
            for inner in encoders
            for name in (*TOLD, "patterns", "positions")
        ),
        ("not used", ", ".join(unused[:6]) + more),
        ("labels", ", ".join(spec.head.labels)),
        *_positions(report),
        ("tokenizer", _tokenizer(report)),
        ("token ids", ", ".join(ends) or "none"),
    ]
    return "\n".join([str(report["path"]), *(f"  {name:<15}{fact}" for name, fact in facts if fact)])


def _positions(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    r = report["rotary"]
    if r is None:
        return [("positions", report["positions"])]
    shown = ", ".join(cell(f) for f in r["frequencies"][:4])
    more = f", ... {cell(r['frequencies'][-1])}" if len(r["frequencies"]) > 4 else ""
    note = "; longer rows have others" if r["length_dependent"] else ""
    amplitude = f", amplitude {r['amplitude']:.6g}" if r["amplitude"] != 1 else ""
    return [
        (
            "rotary",
            f"theta {r['theta']:g}, pairing {r['pairing']} ({r['pairing_because']}), {r['dims']} dims",
        ),
        ("scaling", f"{r['scaling'] or 'none'}{amplitude}"),
        ("frequencies", f"{shown}{more} radians per token ({len(r['frequencies'])} pairs){note}"),
        ("waves", f"{cell(r['shortest_wave'])} to {cell(r['longest_wave'])} tokens"),
    ]


def _tokenizer(report: Mapping[str, Any]) -> str:
    t = report["tokenizer"]
    if t is None:
        return "none in the folder"
    misfit = "" if t["fits"] else f" (DOES NOT FIT: the embedding has {report['spec'].vocab:,} rows)"
    return f"{t['kind']}, {t['tokens']:,} tokens{misfit}; {'a' if t['chat_template'] else 'no'} chat template"


def _facts(spec: "ModelSpec") -> dict[str, Any]:
    from headway.models.description import brief

    encoder = None if spec.encoder is None else _facts(spec.encoder)
    named = {"patterns": [str(p) for p in spec.patterns], "mixers": [brief(m) for m in spec.mixers]}
    return {**vars(spec), **named, "encoder": encoder}


def _kept(report: Mapping[str, Any]) -> str:
    per_token, memory = report["kv_bytes_per_token"], report["memory_bytes_per_token"]
    if report["kind"] == "encoder":
        return "none are kept: an encoder reads a text at once"
    per = "states that do not grow with the text" if per_token is None else f"{size(per_token)} per token"
    return per if memory is None else f"{per} of the target, {size(memory)} per token of the source"


def models(*, json: bool = False) -> None:
    """List the model families and the catalog of sizes, with what each is and its number of parameters.

    Families are for `headway train --family`; `model_type` is their name in transformers. Names of the catalog are for
    `headway plan` and `headway train --model`. One table is the comparison of Su et al. 2021 (RoFormer), section 4.5:
    unit of a token x kind of position. Nothing is loaded.
    """
    from headway.checkpoints.hf.layouts import family_rows
    from headway.models import catalog

    families = family_rows()
    compared = [catalog.row(name) for name in catalog.COMPARED]
    sizes = [catalog.row(name) for name in catalog.names()]
    columns = ("family", "model_type", "about")
    paper = ("name", "family", "tokens", "positions", "vocab", "context")
    shape = ("name", "kind", "positions", "parameters", "layers", "width", "heads", "kv_heads", "hidden", "vocab",
             "context")  # fmt: skip
    parts = [
        "Families",
        _table(families, columns, about="what it is"),
        "Chinese encoders, as the paper of RoFormer compares them",
        _table(compared, paper, name="model"),
        "Sizes: parameters are those of the module, a tied output layer counted once",
        _table(sizes, shape, name="model", kv_heads="kv heads"),
    ]
    report = {"families": families, "compared": compared, "models": sizes}
    print_report(report, "\n\n".join(parts), json)


def _table(rows: Sequence[Mapping[str, object]], attributes: Sequence[str], **titles: str) -> str:
    """Returns a table with a line for each of `rows` and a column for each attribute, under its title or its name."""
    cells = [[row[name] for name in attributes] for row in rows]
    return table([titles.get(name, name) for name in attributes], cells)


def tokenize(
    tokenizer: Path, text: str, *, pair: str | None = None, special: bool = False, json: bool = False
) -> None:
    """Show the tokens of a text, with ids, types and offsets, including the special tokens that the tokenizer adds.

    tokenizer: a folder with a tokenizer, or one of its files
    text: the text
    pair: a second text, encoded as a pair with the first
    special: treat special tokens written in the text as special tokens, not text
    """
    from headway.text import Tokenizer

    read = Tokenizer.load(tokenizer)
    texts = [text] if pair is None else [text, pair]
    (inputs,) = read.inputs([(text, pair) if pair is not None else text], special=special)
    rows, shown = [], []
    for i, kind, place, source in zip(
        inputs.ids, inputs.token_types, inputs.offsets, inputs.texts, strict=True
    ):
        start, end = place or (None, None)
        covers = None if source is None else texts[source][start:end]
        row = {"id": i, "piece": read.token(i), "type": kind, "text": source, "start": start, "end": end}
        rows.append({**row, "covers": covers})
        where = ("", "") if covers is None else (f"{start}:{end}", repr(covers))
        shown.append((str(i), row["piece"], kind, *where))
    characters = sum(map(len, texts))
    report = table(["id", "piece", "type", "place", "covers"], shown)
    print_report(
        {"tokenizer": str(tokenizer), "tokens": rows, "characters": characters},
        f"{report}\n{len(rows)} tokens, {characters} characters",
        json,
    )
