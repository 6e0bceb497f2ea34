"""Tensors under their names and ours, by the rules of a layout; lazily, and strict about what is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from headway.checkpoints.layouts.base import Layout, Rule
from headway.checkpoints.lazy import Form, LazyTensors, Made, forms
from headway.errors import CheckpointError, did_you_mean
from headway.models import ModelSpec, blank


def own_shapes(spec: ModelSpec) -> dict[str, Tensor]:
    """Our tensors of a spec on the device "meta", in their one order."""
    with torch.device("meta"):
        return dict(blank(spec).state_dict())


def bare(spec: ModelSpec) -> bool:
    """Whether transformers' class is the stack alone, whose names have no prefix."""
    return spec.head.task in ("states", "embed") and spec.encoder is None


def rules_of(layout: Layout, spec: ModelSpec, prefix: bool) -> list[Rule]:
    """The layout's rules for a spec, with or without the prefix of their names."""
    rules = list(layout.rules(spec))
    if prefix or not layout.prefix:
        return rules
    cut = layout.prefix
    return [Rule(r.ours, r.theirs.removeprefix(cut), r.join, r.split) for r in rules]


def imported(
    layout: Layout, tensors: LazyTensors, spec: ModelSpec, path: Path, other_head: bool = False
) -> LazyTensors:
    """A checkpoint's tensors under our names; with `other_head`, those of the head that it was saved with are not
    needed.

    Raises CheckpointError for tensors that are missing, unexpected or of another shape than the config says, listed
    together with the nearest names; for tied tensors and constants that differ."""
    found = forms(tensors)
    prefix = not layout.prefix or any(name.startswith(layout.prefix) for name in found)
    meta = own_shapes(spec)
    rules = rules_of(layout, spec, prefix)
    assert sorted(n for r in rules for n in r.ours) == sorted(meta), "rules and module disagree"
    wanted = {r.theirs: tuple(r.join([meta[n] for n in r.ours]).shape) for r in rules}
    aliases = {_place(a, layout, prefix): _place(b, layout, prefix) for a, b in layout.aliases.items()}
    source = {name: name for name in wanted}
    for alias, name in aliases.items():
        if alias in found and name in wanted and alias not in wanted:
            if name not in found:
                source[name] = alias
            elif not torch.equal(tensors[alias], tensors[name]):
                raise CheckpointError(f"{path}: {alias} and {name} are one tensor in this model, but differ")
    constants = layout.constants(spec)
    for name, value in constants.items():
        if name in found and not torch.equal(tensors[name].to(value.dtype), value):
            raise CheckpointError(
                f"{path}: {name} is not {value.flatten()[:1].tolist()} throughout, and would be ignored"
            )
    spare = {n for n in found if n not in wanted and n not in aliases and n not in constants}
    known = (*layout.unused, *(layout.heads if other_head else ()))
    places = tuple(_place(name, layout, prefix) for name in known)
    spare = {n for n in spare if not n.startswith(places) and not n.endswith(places)}
    compare({n: found[source[n]] for n in wanted if source[n] in found}, wanted, spare, path)
    at = {name: (rule, i) for rule in rules for i, name in enumerate(rule.ours)}

    def make(name: str) -> Tensor:
        rule, i = at[name]
        return rule.split(tensors[source[rule.theirs]])[i]

    return Made(
        {n: Form(tuple(t.shape), found[source[at[n][0].theirs]].dtype) for n, t in meta.items()}, make
    )


def exported(layout: Layout, state: Mapping[str, Tensor], spec: ModelSpec) -> Mapping[str, Tensor]:
    """Our tensors under their names, made when asked for."""
    rules = {r.theirs: r for r in rules_of(layout, spec, not bare(spec))}
    constants = layout.constants(spec)
    meta, ours = own_shapes(spec), forms(state)
    shapes = {
        name: Form(tuple(r.join([meta[n] for n in r.ours]).shape), ours[r.ours[0]].dtype)
        for name, r in rules.items()
    }
    shapes |= {name: Form(tuple(value.shape), value.dtype) for name, value in constants.items()}

    def make(name: str) -> Tensor:
        if name in constants:
            return constants[name]
        rule = rules[name]
        return rule.join([state[n] for n in rule.ours]).contiguous()

    return Made(shapes, make)


def compare(
    found: Mapping[str, Form],
    wanted: Mapping[str, tuple[int, ...]],
    spare: set[str],
    path: Path,
    tip: str = "",
) -> None:
    """Raise CheckpointError that lists what is missing, unexpected (`spare`) or of another shape; `tip` ends it."""
    lines = [f"missing: {n}{_hint(n, spare)}" for n in wanted if n not in found]
    lines += [f"unexpected: {n}{did_you_mean(n, wanted)}" for n in sorted(spare)]
    lines += [
        f"shape: {n} is {list(found[n].shape)}, the config says {list(shape)}"
        for n, shape in wanted.items()
        if n in found and found[n].shape != shape
    ]
    if lines:
        more = [f"... and {len(lines) - 20} more"] if len(lines) > 20 else []
        raise CheckpointError(
            f"{path}: the weights do not fit config.json ({len(lines)} differences)\n  "
            + "\n  ".join(lines[:20] + more)
            + tip
        )


def _hint(name: str, spare: set[str]) -> str:
    return did_you_mean(name, spare).replace("did you mean", "nearest there:").replace("?", "")


def _place(name: str, layout: Layout, prefix: bool) -> str:
    return name if prefix else name.removeprefix(layout.prefix)
