"""Tensors under their names and ours, by the rules of a layout; lazily, and strict about what is there."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from headway.checkpoints.hf.layouts.base import Layout
from headway.checkpoints.hf.layouts.rules import Rule
from headway.checkpoints.storage.lazy import Form, LazyTensors, Made, forms
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
    tensors = _modern(layout, tensors, path)
    found = dict(forms(tensors))
    meta = own_shapes(spec)
    prefix = _prefixed(layout, found)
    rules = rules_of(layout, spec, prefix)
    assert sorted(n for r in rules for n in r.ours) == sorted(meta), "rules and module disagree"
    wanted = {r.theirs: tuple(r.join([meta[n] for n in r.ours]).shape) for r in rules}
    source = {name: name for name in wanted}
    pairs = _pairs(layout, spec, wanted, prefix)
    for second, (first, tied) in pairs.items():
        if second not in found:
            continue
        if first not in found:
            source[first] = second
        elif tied and not torch.equal(tensors[second], tensors[first]):
            raise CheckpointError(
                f"{path}: {second} and {first} are one tensor in this model, but differ: config.json is another "
                "model's (tie_word_embeddings, if the second is a matrix of its own), or the file is damaged"
            )
    zeros = set()
    for name, other in layout.stand_in.items():
        name = _place(name, layout, prefix)
        if name in wanted and name not in found and other is None:
            zeros.add(name)
            found[name] = Form(wanted[name], next(iter(found.values())).dtype)
        elif name in wanted and name not in found and other is not None:
            source[name] = source[_place(other, layout, prefix)]
    constants = _constant_shapes(layout, spec, prefix)
    for name, shape in constants.items():
        if name in found and (
            found[name].shape != shape
            or not _is_constant(tensors[name], _constants(layout, spec, prefix)[name])
        ):
            raise CheckpointError(
                f"{path}: {name} is not what it is in every model of the sizes in config.json ({list(shape)}), and "
                "would be ignored: config.json is another model's, or the file is damaged"
            )
    spare = {n for n in found if n not in wanted and n not in pairs and n not in constants}
    known = (*layout.unused, *(layout.heads if other_head else ()))
    places = tuple(_place(name, layout, prefix) for name in known)
    begin = tuple(name for name in places if name.endswith("."))
    spare = {n for n in spare if not n.startswith(begin) and not n.endswith(places)}
    there = {n: found[source[n]] for n in wanted if source[n] in found}
    outputs = [r.theirs for r in rules if r.ours[0] in ("lm_head.weight", "head.out.weight")]
    lost = [n for n in outputs if n not in there and spec.head.task in ("lm", "masked-lm")]
    tips = [
        f"\n{n} is missing: if it is the embedding itself, config.json must say tie_word_embeddings: true"
        for n in lost
    ]
    compare(there, wanted, spare, path, "".join(tips))
    at = {name: (rule, i) for rule in rules for i, name in enumerate(rule.ours)}

    def make(name: str) -> Tensor:
        rule, i = at[name]
        if rule.theirs in zeros:
            return torch.zeros(meta[name].shape, dtype=found[rule.theirs].dtype)
        return rule.split(tensors[source[rule.theirs]])[i]

    return Made(
        {n: Form(tuple(t.shape), found[source[at[n][0].theirs]].dtype) for n, t in meta.items()}, make
    )


def left_out(layout: Layout, tensors: LazyTensors, spec: ModelSpec) -> tuple[str, ...]:
    """Names in a checkpoint that `imported` does not read: what its model has and this one has not."""
    modern = {_new_name(layout, name): name for name in tensors.forms}
    prefix = _prefixed(layout, modern)
    read = {r.theirs for r in rules_of(layout, spec, prefix)}
    read |= _pairs(layout, spec, read, prefix).keys() | _constant_shapes(layout, spec, prefix).keys()
    return tuple(old for new, old in modern.items() if new not in read)


def exported(layout: Layout, state: Mapping[str, Tensor], spec: ModelSpec) -> Mapping[str, Tensor]:
    """Our tensors under their names, made when asked for."""
    prefix = not bare(spec)
    rules = {r.theirs: r for r in rules_of(layout, spec, prefix)}
    pairs = _pairs(layout, spec, rules, prefix)
    rules |= {name: replace(rules[first], theirs=name) for name, (first, tied) in pairs.items() if not tied}
    constants = _constants(layout, spec, prefix)
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
            f"{path}: the weights do not fit config.json ({len(lines)} difference{'s' * (len(lines) > 1)}): one of the "
            "two is incomplete, or another model's\n  " + "\n  ".join(lines[:20] + more) + tip
        )


def _hint(name: str, spare: set[str]) -> str:
    return did_you_mean(name, spare).replace("did you mean", "nearest there:").replace("?", "")


def _prefixed(layout: Layout, names: Iterable[str]) -> bool:
    """Whether a file has the names of a class with a head."""
    return not layout.prefix or any(name.startswith(layout.prefix) for name in names)


def _pairs(
    layout: Layout, spec: ModelSpec, wanted: Container[str], prefix: bool
) -> dict[str, tuple[str, bool]]:
    """Second names of what is wanted: name -> the first, and whether both are one tensor in transformers, too.

    They are not where an alias is a tensor of its own (nothing is tied) and the other name is not wanted: transformers
    then reads the alias, and has the other for nothing."""
    found = {}
    aliases = layout.aliases(spec) if callable(layout.aliases) else layout.aliases
    for alias, name in aliases.items():
        alias, name = _place(alias, layout, prefix), _place(name, layout, prefix)
        if name in wanted and alias not in wanted:
            found[alias] = (name, True)
        elif alias in wanted and name not in wanted:
            found[name] = (alias, False)
    return found


def _constants(layout: Layout, spec: ModelSpec, prefix: bool) -> dict[str, Tensor]:
    return {_place(name, layout, prefix): value for name, value in layout.constants(spec).items()}


def _constant_shapes(layout: Layout, spec: ModelSpec, prefix: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of the constants, whatever sizes the config says: none is made."""
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in _constants(layout, spec, prefix).items()}


def _modern(layout: Layout, tensors: LazyTensors, path: Path) -> LazyTensors:
    """The same under the names of today. Raises CheckpointError for one that is there under both."""
    names: dict[str, str] = {}
    for old in tensors.forms:
        new = _new_name(layout, old)
        if new in names:
            raise CheckpointError(f"{path}: {old} and {names[new]} are two names of one tensor; drop one")
        names[new] = old
    return tensors if all(new == old for new, old in names.items()) else tensors.renamed(names)


def _new_name(layout: Layout, name: str) -> str:
    for old, new in layout.renamed.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _is_constant(found: Tensor, value: Tensor) -> bool:
    """Whether a stored tensor is the value, up to the rounding of the dtype that it is stored in."""
    tolerance = torch.finfo(found.dtype).eps
    return found.shape == value.shape and torch.allclose(found.to(value.dtype), value, 0.0, tolerance)


def _place(name: str, layout: Layout, prefix: bool) -> str:
    return name if prefix else name.removeprefix(layout.prefix)
