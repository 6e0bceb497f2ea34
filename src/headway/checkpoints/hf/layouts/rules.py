"""Rules: how tensors of ours correspond to those of transformers, both ways.

"#" in a name is the number of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headway.models import ModelSpec

WB = ("weight", "bias")


@dataclass(frozen=True)
class Rule:
    """theirs = join(ours), ours = split(theirs)."""

    ours: tuple[str, ...]
    theirs: str
    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]

    def at(self, layer: int) -> Rule:
        """The rule of one layer."""
        number = str(layer)
        ours = tuple(name.replace("#", number) for name in self.ours)
        return replace(self, ours=ours, theirs=self.theirs.replace("#", number))

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
    """

    rules: Callable[[ModelSpec], Sequence[Rule]]
    prefix: str = ""
    aliases: Mapping[str, str] | Callable[[ModelSpec], Mapping[str, str]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    stand_in: Mapping[str, str | None] = field(default_factory=dict)
    unused: Sequence[str] = ()
    heads: Sequence[str] = ()
    constants: Callable[[ModelSpec], Mapping[str, Tensor]] = lambda spec: {}


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


def sublayers(ours: str, theirs: str, names: Mapping[str, str], leaves: Sequence[str]) -> list[Rule]:
    """`same` for every module of a layer: ours + name + leaf is theirs + names[name] + leaf."""
    return [same(f"{ours}{a}.{leaf}", f"{theirs}{b}.{leaf}") for a, b in names.items() for leaf in leaves]


def layered(rules: Sequence[Rule], layers: int) -> list[Rule]:
    """Rules with "#" once for each layer, the others once."""
    return [
        rule for one in rules for rule in ([one.at(i) for i in range(layers)] if "#" in one.theirs else [one])
    ]


def qkv(
    spec: ModelSpec,
    theirs: str,
    leaves: Sequence[str] = WB,
    *,
    by_group: bool = False,
    transpose: bool = False,
) -> list[Rule]:
    """Queries, keys and values of each layer in one tensor: `fused`, or `interleaved` where `by_group`."""
    heads, kv_heads, d = spec.heads, spec.kv_heads, spec.head_dim
    rules = []
    for leaf in leaves:
        ours = [f"model.layers.#.self_attn.{name}_proj.{leaf}" for name in "qkv"]
        if by_group:
            rules.append(interleaved(ours, f"{theirs}.{leaf}", heads, kv_heads, d))
        else:
            rules.append(fused(ours, f"{theirs}.{leaf}", [heads * d, kv_heads * d, kv_heads * d], transpose))
    return rules


def decoder_names(
    rules: Callable[[ModelSpec], Sequence[Rule]],
    prefix: str,
    embedding: str,
    *,
    head: str = "lm_head",
    unused: Sequence[str] = (),
) -> TensorNames:
    """The names of a decoder whose output layer may be its embedding."""
    return TensorNames(
        rules=rules, prefix=prefix, aliases={f"{head}.weight": f"{embedding}.weight"}, unused=unused
    )


def ends(
    spec: ModelSpec, embedding: str, norm: str, leaves: Sequence[str] = WB, head: str = "lm_head"
) -> list[Rule]:
    """A decoder's tensors outside of its layers: embedding, last norm and output layer."""
    return [
        same("model.embed_tokens.weight", f"{embedding}.weight"),
        *sublayers("model.", "", {"norm": norm}, leaves),
        *output(spec, head),
    ]


def output(spec: ModelSpec, head: str = "lm_head") -> list[Rule]:
    """The output layer's matrix, unless it is the embedding."""
    return [] if spec.tied else [same("lm_head.weight", f"{head}.weight")]
