"""Imports and exports tensors between a family's names and ours, lazily; strict about missing and unexpected ones."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.hf.layouts.rules import Rule, TensorNames, layered, own_shapes, same
from headway.errors import CheckpointError
from headway.models import ModelSpec, cost
from headway.storage.lazy import Form, LazyTensors, Made, compare, lazy, with_values, with_zeros

OWN_NAMES = TensorNames(
    rules=lambda spec: [same(name, name) for name in own_shapes(spec)],
    aliases=lambda spec: {"lm_head.weight": "model.embed_tokens.weight"} if spec.tied else {},
    unused=(".rotary_emb.inv_freq",),  # written by old versions; a function of the config
    heads=("head.",),
    outputs={"lm": "lm_head"},
)
"""The names of our modules, which are those of LLaMA in transformers."""


def renamed(
    names: Mapping[str, str],
    own_rules: Callable[[ModelSpec], list[Rule]] = lambda spec: [],
    unused: Sequence[str] = (),
    **fields: Any,
) -> TensorNames:
    """Returns our names with the substrings `names` replaced, except for tensors that have `own_rules`; `unused` are
    additional unused tensors, `fields` other fields of `TensorNames`."""

    def theirs(ours: str) -> str:
        for part, other in names.items():
            ours = ours.replace(part, other)
        return ours

    def rules(spec: ModelSpec) -> list[Rule]:
        extra = layered(own_rules(spec), spec)
        taken = {name for rule in extra for name in rule.ours}
        return [*extra, *(same(name, theirs(name)) for name in own_shapes(spec) if name not in taken)]

    return replace(OWN_NAMES, rules=rules, unused=(*OWN_NAMES.unused, *unused), **fields)


def imported(
    names: TensorNames,
    tensors: LazyTensors,
    spec: ModelSpec,
    path: Path,
    other_head: bool = False,
    described_by: str = "config.json",
) -> tuple[LazyTensors, tuple[str, ...]]:
    """Returns a checkpoint's tensors under our names, and the stored names of unused ones: those that its model has and
    this one has not. With `other_head`, tensors of the head that it was saved with are not needed; `described_by` names
    the source of the spec in messages.

    Raises CheckpointError for tensors that are missing, unexpected or of another shape than the config implies, listed
    together with the nearest names; for two names of one tensor, and for tied tensors and constants that differ."""
    _check_stored(spec, tensors, path, described_by)
    modern: dict[str, str] = {}
    for old in tensors.forms:
        new = next((old.removesuffix(a) + b for a, b in names.renamed.items() if old.endswith(a)), old)
        if new in modern:
            raise CheckpointError(f"{path}: {old} and {modern[new]} are two names of one tensor; remove one")
        modern[new] = old
    tensors = tensors.renamed(modern)
    stored = dict(tensors.forms)
    names_here = _resolved(names, spec, stored)
    rules, ours, pairs = names_here.rules, own_shapes(spec), names_here.pairs
    assert sorted(n for r in rules.values() for n in r.ours) == sorted(ours), "rules and module disagree"
    expected = {name: _joined_shape(rule, ours) for name, rule in rules.items()}
    source = {name: name for name in expected}
    for second, (first, tied) in pairs.items():
        if second not in stored:
            continue
        if first not in stored:
            source[first] = second
        elif tied and not torch.equal(tensors[second], tensors[first]):
            raise CheckpointError(
                f"{path}: {second} and {first} are tied in config.json, but differ in the file: set "
                "tie_word_embeddings to false if both are trained; otherwise config.json or the file is wrong"
            )
    absent: dict[str, Form] = {}
    for name, other in names_here.stand_in.items():
        if name not in expected or name in stored:
            continue
        if other is not None:
            source[name] = source[other]
            continue
        absent[name] = stored[name] = Form(expected[name], next(iter(stored.values())).dtype)
    constants = names_here.constant_shapes
    for name, shape in constants.items():
        if name in stored and (
            stored[name].shape != shape or not _is_constant(tensors[name], names_here.constants[name])
        ):
            raise CheckpointError(
                f"{path}: {name} must be the constant of shape {list(shape)} that follows from config.json, but "
                "differs: config.json is another model's, or the file is damaged"
            )
    present = {n: stored[source[n]] for n in expected if source[n] in stored}
    extra = {n for n in stored if n not in expected and n not in pairs and n not in constants}
    outputs = {"lm_head.weight", "head.out.weight"} if spec.head.task in ("lm", "masked-lm") else set()
    tips = [
        f"\n{n} is missing: if it is the embedding itself, config.json must say tie_word_embeddings: true"
        for n, rule in rules.items()
        if n not in present and rule.ours[0] in outputs
    ]
    compare(
        *(path, present, expected, names_here.unexpected(extra, other_head)),
        fault=f"the weights do not fit {described_by}",
        says="the config says",
        tip="".join(tips),
    )
    dtypes = {name: stored[source[rule.theirs]].dtype for rule in rules.values() for name in rule.ours}
    forms = {name: Form(tuple(value.shape), dtypes[name]) for name, value in ours.items()}
    unused = tuple(old for new, old in modern.items() if new in extra)
    return _lazily(with_zeros(tensors, absent), rules.values(), source, forms), unused


def rules_by_name(
    names: TensorNames, spec: ModelSpec, stored: Iterable[str] | None = None
) -> Mapping[str, Rule]:
    """Returns the rule of every tensor of a model of `spec`, by its name in the class of transformers for its head, or
    in a checkpoint with the names `stored`, which may be of the class for another head."""
    return _resolved(names, spec, stored).rules


def linear_rules(rules: Mapping[str, Rule], layers: Container[str]) -> dict[str, Rule]:
    """Returns the rules of the weights of `layers`, by the names of the layers in transformers."""
    return {
        theirs.removesuffix(".weight"): rule
        for theirs, rule in rules.items()
        if theirs.endswith(".weight") and not rule.stacked and all(name in layers for name in rule.layers)
    }


def exported(names: TensorNames, state: Mapping[str, Tensor], spec: ModelSpec) -> LazyTensors:
    """Returns our tensors under the family's names, joined when read; some may be rows of quantization codes."""
    resolved = _resolved(names, spec)
    aliases = {
        name: replace(resolved.rules[first], theirs=name)
        for name, (first, tied) in resolved.pairs.items()
        if not tied
    }
    rules, constants, ours = {**resolved.rules, **aliases}, resolved.constants, lazy(state).forms
    blanks = {name: torch.empty(form.shape, device="meta") for name, form in ours.items()}
    shapes = {
        name: Form(_joined_shape(rule, blanks), ours[rule.ours[0]].dtype) for name, rule in rules.items()
    }
    shapes |= {name: Form(tuple(value.shape), value.dtype) for name, value in constants.items()}

    def make(name: str) -> Tensor:
        if name in constants:
            return constants[name]
        rule = rules[name]
        return rule.join([state[n] for n in rule.ours]).contiguous()

    return Made(shapes, make)


def _joined_shape(rule: Rule, ours: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Returns the shape of their tensor; `ours` are tensors on the device "meta"."""
    return tuple(rule.join([ours[name] for name in rule.ours]).shape)


@dataclass(frozen=True)
class _Resolved:
    """The names of a family for one spec, with or without their prefix."""

    names: TensorNames
    spec: ModelSpec
    prefix: bool

    def place(self, name: str) -> str:
        """Returns a name with or without the prefix, as this checkpoint has it."""
        return name if self.prefix else name.removeprefix(self.names.prefix)

    @cached_property
    def rules(self) -> Mapping[str, Rule]:
        """The rules of all tensors, by the names of theirs."""
        rules = layered(self.names.rules(self.spec), self.spec)
        return {name: replace(rule, theirs=name) for rule in rules for name in (self.place(rule.theirs),)}

    @cached_property
    def pairs(self) -> Mapping[str, tuple[str, bool]]:
        """Second names of expected tensors: name -> the first name, and whether both are one tensor in transformers.

        They are not if an alias is a tensor of its own (nothing is tied) and the other name is not expected:
        transformers then reads the alias, and ignores the other."""
        renames = {}
        for alias, name in self.names.aliases(self.spec).items():
            alias, name = self.place(alias), self.place(name)
            if name in self.rules and alias not in self.rules:
                renames[alias] = (name, True)
            elif alias in self.rules and name not in self.rules:
                renames[name] = (alias, False)
        return renames

    @property
    def stand_in(self) -> Mapping[str, str | None]:
        """The tensor that is used if one is absent (None: zeros)."""
        table = self.names.stand_in.items()
        return {self.place(a): None if b is None else self.place(b) for a, b in table}

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """Tensors that are the same in every model of these sizes."""
        return {self.place(name): value for name, value in self.names.constants(self.spec).items()}

    @cached_property
    def constant_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the constants, computed without allocating them."""
        with torch.device("meta"):
            return {name: tuple(value.shape) for name, value in self.constants.items()}

    def unexpected(self, spare: Iterable[str], other_head: bool) -> set[str]:
        """Returns the names in `spare` that are not allowed."""
        known = (*self.names.unused, *(self.names.heads if other_head else ()))
        places = tuple(self.place(name) for name in known)
        begin = tuple(name for name in places if name.endswith("."))
        return {name for name in spare if not name.startswith(begin) and not name.endswith(places)}


def _resolved(names: TensorNames, spec: ModelSpec, stored: Iterable[str] | None = None) -> _Resolved:
    """Returns the names in a checkpoint with the tensors `stored`, or, if that is None, those that transformers writes:
    the class without a head is only the stack, and its names have no prefix."""
    if stored is None:
        prefix = spec.head.task not in ("states", "embed") or spec.encoder is not None
    else:
        prefix = any(name.startswith(names.prefix) for name in stored)
        for end, other in names.others.items():
            names = other if any(name.endswith(end) for name in stored) else names
    return _Resolved(names, spec, prefix)


def _lazily(
    tensors: LazyTensors,
    rules: Iterable[Rule],
    source: Mapping[str, str],
    ours: Mapping[str, Form],
) -> LazyTensors:
    """Returns our tensors, split lazily from theirs; `source` maps their names to those in `tensors`."""
    places = {name: (rule, i) for rule in rules for i, name in enumerate(rule.ours)}

    def make(name: str) -> Tensor:
        rule, i = places[name]
        if not rule.stacked:
            return rule.split(tensors[source[rule.theirs]])[i]
        # tensor i of ours is in slice e: of E experts with gate and up, ours[5] is the up (1) of expert 2
        e, i = divmod(i, len(rule.ours) // rule.stacked)
        _, *inner = tensors.forms[source[rule.theirs]].shape
        box = (slice(e, e + 1), *(slice(0, size) for size in inner))
        return replace(rule, stacked=0).split(tensors.part(source[rule.theirs], box)[0])[i]

    alike = {name: source[rule.theirs] for name, (rule, _) in places.items() if rule.renames_only}
    split = {name: form for name, form in ours.items() if name not in alike}
    return with_values(tensors.renamed(alike), split, make).renamed({name: name for name in ours})


def _check_stored(spec: ModelSpec, tensors: LazyTensors, path: Path, described_by: str) -> None:
    """Raises CheckpointError for a spec with more layers than there are tensors, or with 2^60 parameters or more: names
    and shapes of such a model cannot be listed."""
    if spec.layers > len(tensors):
        raise CheckpointError(
            f"{path}: {described_by} has {spec.layers:,} layers, but the weights have only {len(tensors):,} tensors"
        )
    if cost.parameter_count(spec) >= 2**60:
        raise CheckpointError(
            f"{path}: {described_by} has {cost.parameter_count(spec):.3g} parameters, but the weights are "
            f"{tensors.nbytes:,} bytes"
        )


def _is_constant(stored: Tensor, value: Tensor) -> bool:
    """Returns whether a stored tensor of the same shape equals the value, up to the rounding of the dtype that it is
    stored in."""
    tolerance = torch.finfo(stored.dtype).eps if stored.is_floating_point() else 0.0
    return torch.allclose(stored.to(value.dtype), value, 0.0, tolerance)
