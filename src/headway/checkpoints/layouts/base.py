"""A layout: how one family of transformers names its config keys and its tensors, as data.

A rule relates tensors of ours to one of theirs, both ways; "#" in a name is the number of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.families import HARMLESS
from headway.checkpoints.given import Given
from headway.checkpoints.sizes import checked_sizes
from headway.errors import ConfigError, did_you_mean
from headway.models import Head, ModelSpec
from headway.positions import Pairing


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


def same(ours: str, theirs: str) -> Rule:
    """The same tensor under another name."""
    return Rule((ours,), theirs, lambda parts: parts[0], lambda whole: (whole,))


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


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One `model_type`.

    Attributes:
        family: its name, also a name in `headway.models.FAMILIES`.
        architectures: class of transformers -> the kind of head that it has; the first is written.
        translated: keys of `config.json` that `read` looks at.
        only: keys that change nothing at these values, and are refused at others.
        harmless: keys that change nothing that this family computes, whatever they are.
        defaults: what transformers takes for a key that is absent.
        read: the spec's fields from the config (typed access, and the head's kind), without family, head.
        write: config keys from a spec; what it cannot say is noticed by reading it again.
        rules: how tensors correspond, for a spec.
        aliases: theirs -> theirs: second names of tied tensors, which may be there and must then be equal. Where
            nothing is tied and an alias is a tensor of its own, the other name is the one that is not needed.
            They may depend on the spec.
        renamed: ends of names in old files -> today's.
        stand_in: what transformers takes where a tensor is absent: another one, or zeros (None).
        prefix: what the model's own tensors begin with, and do not where the head is "states" or "embed".
        unused: beginnings or ends of names of tensors that may be in a file and are not needed.
        heads: beginnings of names of tensors of heads, not needed when another head is asked for.
        constants: tensors that transformers insists on and that say nothing: name -> value for a spec.
        pairing: of rotary positions, in their files.
    """

    family: str
    architectures: Mapping[str, str]
    translated: Sequence[str]
    read: Callable[[Given, str], dict[str, Any]]
    write: Callable[[ModelSpec], dict[str, Any]]
    rules: Callable[[ModelSpec], Sequence[Rule]]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] | Callable[[ModelSpec], Mapping[str, str]] = field(default_factory=dict)
    stand_in: Mapping[str, str | None] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    unused: Sequence[str] = ()
    heads: Sequence[str] = ()
    constants: Callable[[ModelSpec], Mapping[str, Tensor]] = lambda spec: {}
    pairing: Pairing = "halves"

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """The spec that a config describes. Raises ConfigError for keys, values and classes that are not known."""
        self._check_keys(config)
        classes = config.get("architectures") or [next(iter(self.architectures))]
        if not isinstance(classes, list) or len(classes) != 1 or classes[0] not in self.architectures:
            raise ConfigError(
                f"config.json: architectures {classes} is not one of model_type {self.family!r}"
                f"{did_you_mean(str(classes), self.architectures)}; known are {', '.join(self.architectures)}"
            )
        fields = self.read(Given(config, self.defaults), self.architectures[classes[0]])
        known = {name: fields[name] for name in ("vocab", "width", "layers", "heads", "kv_heads", "hidden")}
        checked_sizes({**known, "head_dim": fields.get("head_dim", fields["width"] // fields["heads"])})
        return ModelSpec.of(self.family, **fields)

    def config(self, spec: ModelSpec) -> dict[str, Any] | None:
        """The config of a spec of this family; None where its head has no class here."""
        kinds = {kind: name for name, kind in reversed(list(self.architectures.items()))}
        if spec.head.task not in kinds:
            return None
        return {
            "architectures": [kinds[spec.head.task]],
            "model_type": self.family,
            **self.write(spec),
        }

    def _check_keys(self, config: Mapping[str, Any]) -> None:
        always = (
            "architectures",
            "model_type",
            "id2label",
            "label2id",
            "num_labels",
            "problem_type",
            "headway",
        )
        for key, value in config.items():
            if key in self.only:
                if value not in self.only[key]:
                    raise ConfigError(
                        f'config.json: "{key}" is {value!r}, which headway does not have for model_type '
                        f"{self.family}; accepted is {' or '.join(map(repr, self.only[key]))}"
                    )
            elif key not in (*self.translated, *self.harmless, *always, *HARMLESS):
                hint = did_you_mean(key, [*self.translated, *self.only, *self.harmless, *HARMLESS])
                raise ConfigError(
                    f'config.json: unknown key "{key}"{hint} for model_type {self.family}; remove it if it does '
                    "not change what the model computes"
                )


def one_number(given: Given, *keys: str) -> float:
    """The number that all these keys have. Raises ConfigError where they differ, since a spec has one for all."""
    values = {key: given.number(key) for key in keys}
    if len(set(values.values())) > 1:
        said = ", ".join(f"{key} {value}" for key, value in values.items())
        raise ConfigError(f"config.json: {said}: headway has one number for these; make them equal")
    return next(iter(values.values()))


def labels(given: Given) -> tuple[str, ...]:
    """Names of the classes by `id2label`, or LABEL_0, ... for `num_labels` (2 unless given), as in transformers."""
    names = given.get("id2label")
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(given.whole("num_labels", 2)))
    if not isinstance(names, Mapping) or {str(k) for k in names} != {str(i) for i in range(len(names))}:
        raise ConfigError(f'config.json: "id2label" must name the classes 0, 1, ..., got {names!r}')
    by_number = {str(key): value for key, value in names.items()}
    return tuple(str(by_number[str(i)]) for i in range(len(names)))


def label_keys(head: Head) -> dict[str, Any]:
    """The config keys of a head's labels."""
    if not head.labels:
        return {}
    return {
        "id2label": {str(i): name for i, name in enumerate(head.labels)},
        "label2id": {name: i for i, name in enumerate(head.labels)},
    }
