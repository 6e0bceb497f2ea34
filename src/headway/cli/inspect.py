"""`headway inspect FOLDER`: what a checkpoint is, before it is loaded."""

from typing import TYPE_CHECKING, Any

from headway.cli._options import AllowPickleOption, FolderArgument, JsonOption
from headway.cli._shared import print_report
from headway.report import cell, size

if TYPE_CHECKING:
    from headway.checkpoints import Inspection
    from headway.models import ModelSpec


def command(
    folder: FolderArgument,
    allow_pickle: AllowPickleOption = False,
    json: JsonOption = False,
) -> None:
    """Spec, effective rotary frequencies and pairing, patterns by layer, sizes, dtype, tokenizer, contexts.

    Reads the config and the headers of the weight files, and checks them against each other.
    """
    from headway.checkpoints import inspect

    found = inspect(folder, allow_pickle=allow_pickle)
    print_report({**vars(found), "spec": _facts(found.spec)}, text(found), json)


def text(found: "Inspection") -> str:
    """The report for people."""
    spec = found.spec
    limit = found.context_limit
    longest = "runs beyond it too" if limit is None else f"refuses more than {limit:,}"
    before = found.rotary.before_scaling if found.rotary else None
    scaled = "" if before is None else f" (before rotary scaling {before:,})"
    lines = [
        f"{found.path}",
        f"  family         {_family(found)}; transformers {found.transformers}",
        f"  kind           {found.kind}; gives {found.gives}",
        f"  parameters     {found.parameter_count:,}"
        f" ({', '.join(f'{k} {v:,}' for k, v in found.parameters.items() if v)})",
        f"  stored         {size(found.stored_bytes)} in {len(found.files)} file{'s' * (len(found.files) > 1)}: "
        + ", ".join(f"{n} tensors {d}" for d, n in found.stored_dtypes.items()),
        f"  runs in        {found.runs_in}",
        f"  shape          {_shape(spec)}",
        f"  heads          {_heads(spec)}",
        f"  biases         {_biases(spec)}",
        f"  norms          {_norms(spec)}",
        f"  context        {spec.trained_context:,} tokens{scaled}; {longest}",
        f"  keys, values   {_kept(found)}",
        "  patterns       "
        + "\n                 ".join(f"layers {layers}: {pattern}" for layers, pattern in found.patterns),
    ]
    if spec.encoder is not None:
        lines += [f"  encoder        {line}" for line in _encoder(spec.encoder)]
    if found.unused:
        more = f", ... and {len(found.unused) - 6} more" if len(found.unused) > 6 else ""
        lines.append(f"  not used       {', '.join(found.unused[:6])}{more}")
    if spec.head.labels:
        lines.append(f"  labels         {', '.join(spec.head.labels)}")
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
    lines.append("  token ids      " + (", ".join(f"{k} {v}" for k, v in ends.items()) or "none"))
    return "\n".join(lines)


def _facts(spec: "ModelSpec") -> dict[str, Any]:
    other = None if spec.encoder is None else _facts(spec.encoder)
    return {**vars(spec), "patterns": [str(p) for p in spec.patterns], "encoder": other}


def _family(found: "Inspection") -> str:
    family, stored_as = found.spec.family, found.model_type
    return family if stored_as == family else f"{family} (model_type {stored_as})"


def _shape(spec: "ModelSpec") -> str:
    columns = f" of {spec.columns} columns" if spec.columns != spec.width else ""
    types = f", {spec.token_types} token type{'s' * (spec.token_types > 1)}" if spec.token_types else ""
    return (
        f"{spec.layers} layers, width {spec.width}, feed-forward {spec.hidden} "
        f"({'gated ' if spec.gated and spec.activation != 'silu' else ''}{spec.activation}), "
        f"vocabulary {spec.vocab}{columns}{types}{', tied' if spec.tied else ''}"
    )


def _heads(spec: "ModelSpec") -> str:
    return (
        f"{spec.heads} query, {spec.kv_heads} key/value ({spec.layout.kind}), {spec.head_dim} dims each"
        + (", queries and keys normed" if spec.qk_norm else "")
        + (", projections of their own for global tokens" if spec.global_projections else "")
        + (f", linear attention ({spec.linear})" if spec.linear is not None else "")
    )


def _norms(spec: "ModelSpec") -> str:
    kind = "RMSNorm" if spec.norm == "rms" else "LayerNorm"
    there = [f"{kind} {spec.order}"]
    there += ["behind the embedding"] * spec.embedding_norm + ["behind the last layer"] * spec.final_norm
    return f"{', '.join(there)}; eps {spec.norm_eps:g}"


def _kept(found: "Inspection") -> str:
    kept, memory = found.kv_bytes_per_token, found.memory_bytes_per_token
    if found.kind == "encoder":
        return "none are kept: an encoder reads a text at once"
    per = "sums that do not grow with the text" if kept is None else f"{size(kept)} per token"
    return per if memory is None else f"{per} of the target, {size(memory)} per token of the source"


def _encoder(spec: "ModelSpec") -> list[str]:
    from headway.checkpoints.inspection import patterns_by_layer

    seen = "; ".join(f"layers {layers}: {pattern}" for layers, pattern in patterns_by_layer(spec))
    return [_shape(spec), _heads(spec), _norms(spec), f"{seen}; {spec.positions}"]


def _biases(spec: "ModelSpec") -> str:
    there = {
        "query, key, value": spec.qkv_bias,
        "attention output": spec.out_bias,
        "feed-forward": spec.mlp_bias,
        "output layer": spec.output_bias,
    }
    return ", ".join(name for name, has in there.items() if has) or "none"
