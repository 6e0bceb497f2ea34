"""`headway inspect FOLDER`: what a checkpoint is, before it is loaded."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli._shared import JsonOption, cell, print_json, size

if TYPE_CHECKING:
    from headway.checkpoints import Inspection


def command(
    folder: Annotated[Path, typer.Argument(help="a Hugging Face folder")],
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="read pickles (weights only)")] = False,
    json: JsonOption = False,
) -> None:
    """Spec, effective rotary frequencies and pairing, patterns by layer, sizes, dtype, tokenizer, contexts.

    Reads the config and the headers of the weight files, and checks them against each other.
    """
    from headway.checkpoints import inspect

    found = inspect(folder, allow_pickle=allow_pickle)
    if json:
        print_json(
            {**vars(found), "spec": {**vars(found.spec), "patterns": [str(p) for p in found.spec.patterns]}}
        )
    else:
        print(text(found))


def text(found: "Inspection") -> str:
    """The report for people."""
    spec = found.spec
    longest = "runs beyond it too" if spec.max_context is None else f"refuses more than {spec.max_context:,}"
    before = found.rotary.before_scaling if found.rotary else None
    scaled = "" if before is None else f" (before rotary scaling {before:,})"
    head = spec.layout
    lines = [
        f"{found.path}",
        f"  family         {found.model_type}; transformers {found.transformers}",
        f"  parameters     {found.parameter_count:,}"
        f" ({', '.join(f'{k} {v:,}' for k, v in found.parameters.items() if v)})",
        f"  stored         {size(found.stored_bytes)} in {len(found.files)} file{'s' * (len(found.files) > 1)}: "
        + ", ".join(f"{n} tensors {d}" for d, n in found.stored_dtypes.items()),
        f"  runs in        {found.runs_in}",
        f"  shape          {spec.layers} layers, width {spec.width}, feed-forward {spec.hidden} ({spec.activation}), "
        f"vocabulary {spec.vocab}{', tied' if spec.tied else ''}",
        f"  heads          {spec.heads} query, {spec.kv_heads} key/value ({head.kind}), {spec.head_dim} dims each"
        + (", queries and keys normed" if spec.qk_norm else ""),
        f"  biases         {_biases(found)}",
        f"  norm eps       {spec.norm_eps:g}",
        f"  context        {spec.trained_context:,} tokens{scaled}; {longest}",
        f"  keys, values   {size(found.kv_bytes_per_token)} per token",
        "  patterns       "
        + "\n                 ".join(f"layers {layers}: {pattern}" for layers, pattern in found.patterns),
    ]
    if found.rotary is None:
        lines.append(f"  positions      {found.positions}")
    else:
        r = found.rotary
        shown = ", ".join(cell(f) for f in r.frequencies[:4])
        more = f", ... {cell(r.frequencies[-1])}" if len(r.frequencies) > 4 else ""
        lines += [
            f"  rotary         theta {r.theta:g}, pairing {r.pairing} ({r.pairing_because}), {r.dims} dims",
            f"  scaling        {r.scaling or 'none'}"
            + (f", amplitude {r.amplitude:.6g}" if r.amplitude != 1 else ""),
            f"  frequencies    {shown}{more} radians per token ({len(r.frequencies)} pairs)"
            + ("; longer rows have others" if r.length_dependent else ""),
            f"  waves          {cell(r.shortest_wave)} to {cell(r.longest_wave)} tokens",
        ]
    if found.tokenizer is None:
        lines.append("  tokenizer      none in the folder")
    else:
        t = found.tokenizer
        known = f"{t['kind']}, {t['tokens']:,} tokens" if "tokens" in t else ", ".join(t["files"])
        misfit = "" if t.get("fits", True) else f" (DOES NOT FIT: the embedding has {spec.vocab:,} rows)"
        lines.append(f"  tokenizer      {known}{misfit}; {'a' if t['chat_template'] else 'no'} chat template")
    ends = {k.removesuffix("_token_id"): v for k, v in found.generation.items() if k.endswith("_token_id")}
    lines.append("  token ids      " + (", ".join(f"{k} {v}" for k, v in ends.items()) or "not said"))
    return "\n".join(lines)


def _biases(found: "Inspection") -> str:
    spec = found.spec
    there = {
        "query, key, value": spec.qkv_bias,
        "attention output": spec.out_bias,
        "feed-forward": spec.mlp_bias,
    }
    return ", ".join(name for name, has in there.items() if has) or "none"
