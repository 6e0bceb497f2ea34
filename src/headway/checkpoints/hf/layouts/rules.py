"""Rules that convert our tensors to those of transformers and back.

"#" in a name is the number of a layer. "Ours" are tensors and modules of headway, "theirs" those of transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from headway.checkpoints.hf.harmless import words
from headway.models import ModelSpec, blank

WB = ("weight", "bias")
Modules = Mapping[str, str]
"""Our modules -> theirs. A name in `FUSED` stands for its parts, which are one tensor in their files."""
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
PROJECTIONS = {
    1: ("o_proj",),
    2: ("qkv_proj", "o_proj"),
    4: ("q_proj", "k_proj", "v_proj", "o_proj"),
}
FORWARD = ("gate_proj", "up_proj", "down_proj")
"""The modules that `block` names, in its order."""


@lru_cache(maxsize=2)
def own_shapes(spec: ModelSpec) -> Mapping[str, Tensor]:
    """Returns our tensors of a spec on the device "meta", in the order of the state dict."""
    with torch.device("meta"):
        return MappingProxyType(dict(blank(spec).state_dict()))


class Change(NamedTuple):
    """An invertible change of one tensor.

    Attributes:
        there: from ours to theirs. back: from theirs to ours.
        rows: whether it only reorders rows, so that quantized codes can be reordered likewise.
    """

    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]
    rows: bool = False


def lifted(axis: int) -> Change:
    """Returns the change to a tensor with an additional axis of size 1 in their files."""
    return Change(lambda x: x.unsqueeze(axis), lambda x: x.squeeze(axis))


@dataclass(frozen=True)
class Rule:
    """Builds one of their tensors from one or several of ours, and splits it again.

    Attributes:
        ours, theirs: names.
        rows: if there are several of ours, the rows of each along the output axis of theirs.
        groups: number of groups of rows in theirs, each with an equal share of every one of ours in turn. Queries, keys
            and values in 2 groups are q0 k0 v0 q1 k1 v1: one group for each kv head; 1 group is q k v.
        transposed: whether their matrix is stored [in, out] (GPT-2's Conv1D).
        changes: applied to each of ours before they are joined; None, or a missing entry, is no change.
        stacked: theirs is [stacked, ...], each slice made of an equal share of ours; 0 means no such axis.
    """

    ours: tuple[str, ...]
    theirs: str
    rows: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False
    changes: tuple[Change | None, ...] = ()
    stacked: int = 0

    def at(self, layer: str) -> "Rule":
        """Returns the rule of one layer, whose number replaces "#"."""
        ours = tuple(name.replace("#", layer) for name in self.ours)
        return replace(self, ours=ours, theirs=self.theirs.replace("#", layer))

    @property
    def layers(self) -> tuple[str, ...]:
        """Our names without ".weight": the layers, if ours are weights."""
        return tuple(name.removesuffix(".weight") for name in self.ours)

    @property
    def renames_only(self) -> bool:
        """Whether theirs is our tensor under another name, so that nothing is computed."""
        return not (self.rows or self.transposed or self.changes or self.stacked)

    @property
    def keeps_rows(self) -> bool:
        """Whether every row of theirs equals a row of ours."""
        return not self.transposed and all(change is None or change.rows for change in self.changes)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Builds theirs from ours."""
        if self.stacked:
            each = len(parts) // self.stacked
            return torch.stack([self._joined(parts[i : i + each]) for i in range(0, len(parts), each)])
        return self._joined(parts)

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        """Splits theirs into ours."""
        if self.stacked:
            return [part for tensor in whole for part in self.split_rows(self._stored(tensor))]
        return self.split_rows(self._stored(whole))

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        return self._stored(self.join_rows(parts))

    def join_rows(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins ours along the output axis, [out, in] even if theirs is stored transposed."""
        changed = [
            part if change is None else change.there(part)
            for part, change in zip_longest(parts, self.changes)
        ]
        if not self.rows:
            return changed[0]
        return torch.cat([part.unflatten(0, (self.groups, -1)) for part in changed], 1).flatten(0, 1)

    def split_rows(self, whole: Tensor) -> Sequence[Tensor]:
        """Splits what `join_rows` returns into ours."""
        parts: Sequence[Tensor] = (whole,)
        if self.rows:
            sizes = [rows // self.groups for rows in self.rows]
            each = whole.unflatten(0, (self.groups, -1)).split(sizes, 1)
            parts = [part.flatten(0, 1) for part in each]
        return [
            part if change is None else change.back(part) for part, change in zip_longest(parts, self.changes)
        ]

    def _stored(self, value: Tensor) -> Tensor:
        return value.T if self.transposed and value.dim() == 2 else value


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """The tensor names of one family.

    Attributes:
        rules: a function that returns the rules of a spec; a rule with "#" applies to every layer.
        prefix: prefix of the stack's tensors, which they lack if the head is "states" or "embed".
        aliases: theirs -> theirs, for a spec: second names of tied tensors, which may be in a file and must then be
            equal. If nothing is tied and an alias is a tensor of its own, the other name is not needed.
        renamed: suffixes of names in old files -> today's.
        stand_in: the tensor that transformers uses if one is absent, or zeros (None).
        unused: prefixes (with the dot) or suffixes of names of tensors that may be in a file and are not needed.
        heads: prefixes of names of tensors of heads, which are not needed if another head is requested.
        constants: tensors that transformers requires and that carry no information: name -> value for a spec.
        outputs: task -> the linear module after the stack, by its name in the class of transformers (files may have
            another name), whose matrix may be the embedding's, or in no file.
        linears: suffixes of layers that are Linear in transformers and not in headway (routers).
        split: whether transformers splits layers that are fused in the files, and reads no quantized codes of those.
        others: suffix of a tensor name -> the names to use for files that have such a tensor.
    """

    rules: Callable[[ModelSpec], Sequence[Rule]]
    prefix: str = ""
    aliases: Callable[[ModelSpec], Mapping[str, str]] = lambda spec: {}
    renamed: Mapping[str, str] = field(default_factory=dict)
    stand_in: Mapping[str, str | None] = field(default_factory=dict)
    unused: Sequence[str] = ()
    heads: Sequence[str] = ()
    constants: Callable[[ModelSpec], Mapping[str, Tensor]] = lambda spec: {}
    outputs: Mapping[str, str] = field(default_factory=dict)
    linears: tuple[str, ...] = ()
    split: bool = False
    others: Mapping[str, "TensorNames"] = field(default_factory=dict)


def same(ours: str, theirs: str) -> Rule:
    """Returns a rule for the same tensor under another name."""
    return Rule((ours,), theirs)


def layered(rules: Sequence[Rule], spec: ModelSpec) -> list[Rule]:
    """Expands rules with "#" to one for each layer that has their tensors; other rules stay as they are."""
    layers = _layers(spec)
    return [rule.at(layer) for rule in rules for layer in layers.get(rule.ours[0], [""])]


@lru_cache(maxsize=2)
def _layers(spec: ModelSpec) -> Mapping[str, list[str]]:
    """Returns our names of a spec with "#" for the number of a layer -> these numbers; [""] outside of layers."""
    numbers: dict[str, list[str]] = {}
    for name in own_shapes(spec):
        before, layers, after = name.partition(".layers.")
        number, _, leaf = after.partition(".")
        numbers.setdefault(f"{before}.layers.#.{leaf}" if layers else name, []).append(number)
    return numbers


def module_rules(
    spec: ModelSpec, modules: Modules, *, by_group: bool = False, transposed: bool = False
) -> list[Rule]:
    """Returns a rule for every tensor that a model of `spec` has in `modules`. With `by_group`, "qkv_proj" has a group
    for each kv head (`Rule.groups`); with `transposed`, matrices are stored [in, out]."""
    existing = _layers(spec)
    heads = tuple(heads * spec.head_dim for heads in (spec.heads, spec.kv_heads, spec.kv_heads))
    sizes = {"qkv_proj": heads, "gate_up_proj": (spec.hidden, spec.hidden)}
    rules = []
    for name, theirs in ((f"{a}.{leaf}", f"{b}.{leaf}") for a, b in modules.items() for leaf in WB):
        fused = next((whole for whole in FUSED if f".{whole}." in name), None)
        parts = (name,) if fused is None else tuple(name.replace(fused, part) for part in FUSED[fused])
        if parts[0] not in existing:
            continue
        if fused is None:
            rules.append(Rule(parts, theirs, transposed=transposed))
        else:
            groups = spec.kv_heads if by_group and fused == "qkv_proj" else 1
            rules.append(Rule(parts, theirs, sizes[fused], groups, transposed))
    return rules


def block(norms: str, attention: str, forward: str) -> dict[str, str]:
    """Returns our modules of a layer -> their names in transformers, which are given as `words` in our order.

    norms: before attention, before the feed-forward, after attention, after the feed-forward.
    attention: queries, keys and values, or one matrix for the three, and the outputs.
    forward: gate, up and down, or up and down.

    `block("ln_1 ln_2", "attn. c_attn c_proj", "mlp. c_fc c_proj")` is GPT-2's."""
    first, middle, last = words(norms), words(attention), words(forward)
    ours = (
        *NORMS[: len(first)],
        *(f"self_attn.{name}" for name in PROJECTIONS[len(middle)]),
        *(f"mlp.{name}" for name in FORWARD[len(FORWARD) - len(last) :]),
    )
    return dict(zip(ours, (*first, *middle, *last), strict=True))


OWN_BLOCK = block(
    "input_layernorm post_attention_layernorm",
    "self_attn. q_proj k_proj v_proj o_proj",
    "mlp. gate_proj up_proj down_proj",
)
"""A layer of LLaMA, whose modules have our names."""


def same_names(*modules: str) -> dict[str, str]:
    """Returns modules that have our names."""
    return dict(zip(modules, modules, strict=True))


def within(ours: str, theirs: str, modules: Modules) -> dict[str, str]:
    """Returns the modules by their full names, with the prefixes `ours` and `theirs`."""
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
    output: str = "lm_head",
    by_group: bool = False,
    transposed: bool = False,
    unused: Sequence[str] = (),
) -> TensorNames:
    """Returns the names of a decoder whose output layer may be its embedding: `modules` are those of a layer, whose
    names begin with `layer`; `top` are additional ones outside of the layers; `by_group` and `transposed` say how a
    layer's matrices are stored. The output layer is `head` in files and `output` in the class."""

    def rules(spec: ModelSpec) -> list[Rule]:
        ends = {"model.embed_tokens": embedding, "model.norm": norm, "lm_head": head, **top}
        inner = within("model.layers.#.", layer, modules(spec) if callable(modules) else modules)
        return [
            *module_rules(spec, ends),
            *module_rules(spec, inner, by_group=by_group, transposed=transposed),
        ]

    return TensorNames(
        rules=rules,
        prefix=prefix,
        aliases=lambda spec: {f"{head}.weight": f"{embedding}.weight"},
        unused=unused,
        outputs={"lm": output},
    )
