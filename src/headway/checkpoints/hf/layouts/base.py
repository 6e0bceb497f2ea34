"""The config keys and tensor names of one family of transformers, as data: a layout."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from headway.checkpoints.hf.config_keys import (
    OURS,
    ConfigReader,
    FieldMap,
    Inexpressible,
    check_keys,
    checked_sizes,
    read_fields,
    write_fields,
)
from headway.checkpoints.hf.harmless import HARMLESS
from headway.checkpoints.hf.layouts.rules import TensorNames
from headway.checkpoints.hf.rope import ROPE, read_rope, write_rope
from headway.errors import ConfigError, did_you_mean
from headway.models import Head, ModelSpec
from headway.positions import Pairing

ALWAYS = ("architectures", "model_type", OURS)
ONLY: Mapping[str, tuple[Any, ...]] = {
    "pruned_heads": ({}, None),
    "gradient_checkpointing": (False, None),
    "add_cross_attention": (False, None),
}
"""`Layout.only` of every family."""


def differing(a: ModelSpec, b: ModelSpec) -> list[str]:
    """Returns the fields in which two specs differ."""
    return [f.name for f in fields(ModelSpec) if getattr(a, f.name) != getattr(b, f.name)]


class Part(NamedTuple):
    """Keys of a config and the fields of a spec that they correspond to, if that is not a one-to-one `Key`.

    Attributes:
        keys: key -> transformers' default if it is absent, or None, unless the layout has another.
        read: returns the fields, from the config (typed access) and the fields read so far. Raises ConfigError for keys
            that contradict each other or the fields.
        write: returns the keys, from a spec; the caller finds what they cannot express by reading them again. Raises
            Inexpressible for a spec that transformers would refuse with another error, or load as another model.
    """

    keys: Mapping[str, Any] = MappingProxyType({})
    read: Callable[[ConfigReader, Mapping[str, Any]], dict[str, Any]] = lambda config, fields: {}
    write: Callable[[ModelSpec], dict[str, Any]] = lambda spec: {}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The folder format of one `model_type`.

    Attributes:
        family: its name, also a name in `headway.models.FAMILIES`.
        architectures: class of transformers -> the task of its head; the first is written.
        keys: fields of the spec that are keys of `config.json`.
        encoder_keys: those of the encoder, which take precedence for it; None unless the family has encoder-decoders.
        more: other keys that `rope` and `parts` read -> transformers' default if they are absent, or None.
        only: keys that have no effect at these values, and are refused at others.
        harmless: keys that have no effect on what this family computes, at any value.
        rope: in a family with rotary positions the key of the share of each head that is rotated, "" if all of it is.
            Its positions and its context are then read from, and written as, all keys of
            `headway.checkpoints.hf.rope.ROPE`, of which `max_position_embeddings` must be present or in `more`. A
            family with other keys leaves this None and has a part (GPT-J in `gpt2.py`).
        parts: other keys and fields, read and written in this order; their fields override those of `keys`.
        tensors: the names of its tensors.
        pairing: rotary pairing of the weights in its files.
        ids: token ids that transformers accepts only as numbers, never null: if a folder has none, they are not
            written.
        also: other families whose folders have this `model_type`.
        generic: whether specs of other families may be written as this one, if it can express them: of other generic
            ones, and of families that have no layout. The family is then stored under the key "headway".
        in_transformers: whether transformers has the family; else its folders are read and written as any other's, and
            reports say that transformers refuses them.
    """

    family: str
    architectures: Mapping[str, str]
    keys: FieldMap
    tensors: TensorNames
    parts: Sequence[Part] = ()
    encoder_keys: FieldMap | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: Sequence[str] = ()
    rope: str | None = None
    pairing: Pairing = "halves"
    ids: Sequence[str] = ()
    also: Sequence[str] = ()
    generic: bool = False
    in_transformers: bool = True

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """Transformers' defaults of all keys that are read; None if it has none."""
        tables = (*self.keys.values(), *(self.encoder_keys or {}).values())
        keys = {name: None if callable(key.default) else key.default for key in tables for name in key.each}
        parts = {name: value for part in self.parts for name, value in part.keys.items()}
        return {**({} if self.rope is None else dict.fromkeys(ROPE)), **parts, **self.more, **keys}

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """Returns the spec that a config describes. Raises ConfigError for unknown keys, values and classes."""
        only = {**ONLY, "is_encoder_decoder": (self.encoder_keys is not None, None), **self.only}
        free = dict.fromkeys((*self.defaults, *self.harmless, *ALWAYS, *HARMLESS))
        check_keys(config, {**free, **only}, of=f" for model_type {self.family}")
        classes = config.get("architectures") or [next(iter(self.architectures))]
        known = [name for name in self.architectures if isinstance(classes, list) and name in classes]
        if len(known) != 1:
            raise ConfigError(
                f"config.json: architectures {classes} is not one of model_type {self.family!r}"
                f"{did_you_mean(str(classes), self.architectures)}; known are {', '.join(self.architectures)}"
            )
        task = self.architectures[known[0]]
        reader = ConfigReader(config, self.defaults, task=task)
        fields = {**checked_sizes(read_fields(reader, self.keys))}
        head_dim = fields.get("head_dim", max(fields["width"] // fields["heads"], 1))
        if self.rope is not None:
            share = reader.number(self.rope) if self.rope else None
            fields |= read_rope(reader, head_dim, pairing=self.pairing, share=share)
        for part in self.parts:
            fields |= part.read(reader, fields)
        checked_sizes({"head_dim": head_dim, **fields})
        if self.encoder_keys is None:
            spec = ModelSpec.of(self.family, **fields)
            return spec.with_head(Head("states")) if spec.causal and task == "states" else spec
        encoder = checked_sizes(read_fields(reader, self.encoder_keys))
        return ModelSpec.of_pair(self.family, encoder=encoder, **fields)

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        """Returns the config of a spec, as far as this family can express it: reading it again shows what is lost.

        Raises Inexpressible for a head that has no class in this family, for one stack if the family has two (or the
        other way round), and whatever the `write` of a part raises."""
        kinds = {kind: name for name, kind in reversed(list(self.architectures.items()))}
        if (spec.encoder is None) != (self.encoder_keys is None):
            raise Inexpressible("encoder")
        if spec.head.task not in kinds:
            raise Inexpressible("head")
        config: dict[str, Any] = {"architectures": [kinds[spec.head.task]], "model_type": self.family}
        config |= write_fields(spec, self.keys)
        if spec.encoder is not None and self.encoder_keys is not None:
            config |= {"is_encoder_decoder": True, **write_fields(spec.encoder, self.encoder_keys)}
        if self.rope is not None:
            config |= write_rope(spec, share=self.rope or None)
        for part in self.parts:
            config |= part.write(spec)
        return config
