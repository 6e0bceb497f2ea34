"""Rules: how tensors of ours correspond to those of transformers, both ways.

"#" in a name is the number of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

from headway.models import ModelSpec, blank

WB = ("weight", "bias")
Modules = Mapping[str, str]
"""Our modules -> theirs. "qkv_proj" stands for q_proj, k_proj and v_proj, which are one tensor there."""


@lru_cache(maxsize=2)
def own_shapes(spec: ModelSpec) -> Mapping[str, Tensor]:
    """Our tensors of a spec on the device "meta", in their one order."""
    with torch.device("meta"):
        return MappingProxyType(dict(blank(spec).state_dict()))


@dataclass(frozen=True)
class Rule:
    """theirs = join(ours), ours = split(theirs)."""

    ours: tuple[str, ...]
    theirs: str
    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]

    def at(self, layer: str) -> Rule:
        """The rule of one layer."""
        ours = tuple(name.replace("#", layer) for name in self.ours)
        return replace(self, ours=ours, theirs=self.theirs.replace("#", layer))

    @property
    def renames_only(self) -> bool:
        """Whether both are one tensor, so that nothing needs to be made of it."""
        return self.join is _only


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """How one family names its tensors.

    Attributes:
        rules: how tensors correspond, for a spec; one with "#" applies to every layer.
        prefix: what the model's own tensors begin with, and do not where the head is "states" or "embed".
        aliases: theirs -> theirs: second names of tied tensors, which may be there and must then be equal. Where
            nothing is tied and an alias is a tensor of its own, the other name is the one that is not needed.
            They may depend on the spec.
        renamed: ends of names in old files -> today's.
        stand_in: what transformers takes where a tensor is absent: another one, or zeros (None).
        unused: beginnings (up to a dot) or ends of names of tensors that may be in a file and are not needed.
        heads: beginnings of names of tensors of heads, not needed when another head is asked for.
        constants: tensors that transformers insists on and that carry no information: name -> value for a spec.
        outputs: task -> the linear module of transformers behind the stack, as its class calls it (files may not),
            whose matrix may be the embedding's, or in no file.
    """

    rules: Callable[[ModelSpec], Sequence[Rule]]
    prefix: str = ""
    aliases: Mapping[str, str] | Callable[[ModelSpec], Mapping[str, str]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    stand_in: Mapping[str, str | None] = field(default_factory=dict)
    unused: Sequence[str] = ()
    heads: Sequence[str] = ()
    constants: Callable[[ModelSpec], Mapping[str, Tensor]] = lambda spec: {}
    outputs: Mapping[str, str] = field(default_factory=dict)


def _only(parts: Sequence[Tensor]) -> Tensor:
    return parts[0]


def same(ours: str, theirs: str) -> Rule:
    """The same tensor under another name."""
    return Rule((ours,), theirs, _only, lambda whole: (whole,))


def transposed(ours: str, theirs: str) -> Rule:
    """A matrix that they store [in, out] (GPT-2's Conv1D)."""
    return Rule((ours,), theirs, lambda parts: parts[0].T, lambda whole: (whole.T,))


def fused(ours: Sequence[str], theirs: str, sizes: Sequence[int], transpose: bool = False) -> Rule:
    """Several tensors of ours one after the other along the output axis; stored [in, out] where `transpose`."""

    def join(parts: Sequence[Tensor]) -> Tensor:
        whole = torch.cat(tuple(parts))
        return whole.T if transpose and whole.dim() == 2 else whole

    def split(whole: Tensor) -> Sequence[Tensor]:
        whole = whole.T if transpose and whole.dim() == 2 else whole
        return torch.split(whole, list(sizes))

    return Rule(tuple(ours), theirs, join, split)


def interleaved(ours: Sequence[str], theirs: str, heads: int, kv_heads: int, head_dim: int) -> Rule:
    """Queries, keys and values (three names) group by group: the queries of a kv head, then its key, its value."""
    group = heads // kv_heads

    def join(parts: Sequence[Tensor]) -> Tensor:
        by_head = [part.unflatten(0, (kv_heads, -1, head_dim)) for part in parts]
        return torch.cat(by_head, 1).flatten(0, 2)

    def split(whole: Tensor) -> Sequence[Tensor]:
        by_head = whole.unflatten(0, (kv_heads, group + 2, head_dim))
        return [part.flatten(0, 2) for part in by_head.split([group, 1, 1], 1)]

    return Rule(tuple(ours), theirs, join, split)


def layered(rules: Sequence[Rule], spec: ModelSpec) -> list[Rule]:
    """Rules with "#" once for each layer that has their tensors, the others once."""
    layers = _layers(spec)
    return [rule.at(layer) for rule in rules for layer in layers.get(rule.ours[0], [""])]


@lru_cache(maxsize=2)
def _layers(spec: ModelSpec) -> Mapping[str, list[str]]:
    """Our names of a spec with "#" for the number of a layer -> these numbers; [""] for a tensor of no layer."""
    found: dict[str, list[str]] = {}
    for name in own_shapes(spec):
        before, layers, after = name.partition(".layers.")
        number, _, leaf = after.partition(".")
        found.setdefault(f"{before}.layers.#.{leaf}" if layers else name, []).append(number)
    return found


def module_rules(
    spec: ModelSpec,
    modules: Modules,
    leaves: Sequence[str] = WB,
    *,
    by_group: bool = False,
    transpose: bool = False,
) -> list[Rule]:
    """A rule for every tensor that a model of `spec` has in `modules`. "qkv_proj" is `interleaved` where `by_group`,
    else `fused`; matrices are stored [in, out] where `transpose`."""
    there, heads, kv_heads, d = _layers(spec), spec.heads, spec.kv_heads, spec.head_dim
    rules = []
    for name, theirs in ((f"{a}.{leaf}", f"{b}.{leaf}") for a, b in modules.items() for leaf in leaves):
        parts = [name.replace("qkv_proj", f"{part}_proj") for part in "qkv"]
        if parts[0] not in there:
            continue
        if name != parts[0] and by_group:
            rules.append(interleaved(parts, theirs, heads, kv_heads, d))
        elif name != parts[0]:
            rules.append(fused(parts, theirs, [heads * d, kv_heads * d, kv_heads * d], transpose))
        else:
            rules.append((transposed if transpose and name.endswith("weight") else same)(name, theirs))
    return rules


def within(ours: str, theirs: str, modules: Modules) -> dict[str, str]:
    """The same modules by their whole names, which begin with `ours` and `theirs`."""
    return {f"{ours}{a}": f"{theirs}{b}" for a, b in modules.items()}


def decoder_names(
    prefix: str,
    embedding: str,
    norm: str,
    layer: str,
    modules: Modules | Callable[[ModelSpec], Modules],
    *,
    top: Modules = MappingProxyType({}),
    head: str = "lm_head",
    by_group: bool = False,
    more: Callable[[ModelSpec], Sequence[Rule]] = lambda spec: (),
    unused: Sequence[str] = (),
) -> TensorNames:
    """The names of a decoder whose output layer may be its embedding: `modules` are those of a layer, whose names begin
    with `layer`, `top` further ones outside of the layers, `more` the rules of what is stored otherwise."""

    def rules(spec: ModelSpec) -> list[Rule]:
        ends = {"model.embed_tokens": embedding, "model.norm": norm}
        inner = within("model.layers.#.", layer, modules(spec) if callable(modules) else modules)
        return [
            *module_rules(spec, ends),
            *module_rules(spec, {"lm_head": head}, ("weight",)),
            *module_rules(spec, {**top, **inner}, by_group=by_group),
            *more(spec),
        ]

    return TensorNames(
        rules=rules,
        prefix=prefix,
        aliases={f"{head}.weight": f"{embedding}.weight"},
        unused=unused,
        outputs={"lm": "lm_head"},
    )
