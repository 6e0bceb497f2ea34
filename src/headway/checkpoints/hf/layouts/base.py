"""A layout: how one family of transformers names its config keys and its tensors, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from headway.checkpoints.hf.config_reader import ConfigReader
from headway.checkpoints.hf.families import HARMLESS
from headway.checkpoints.hf.layouts.field_map import FieldMap, names, read_fields, write_fields
from headway.checkpoints.hf.layouts.rules import Rule
from headway.checkpoints.hf.size_limits import checked_sizes
from headway.errors import ConfigError, did_you_mean
from headway.models import ModelSpec
from headway.positions import Pairing

ALWAYS = ("architectures", "model_type", "id2label", "label2id", "num_labels", "problem_type", "headway")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One `model_type`.

    Attributes:
        family: its name, also a name in `headway.models.FAMILIES`.
        architectures: class of transformers -> the kind of head that it has; the first is written.
        keys: fields of the spec that are keys of `config.json`.
        encoder_keys: those of the encoder's own, which go before; None unless the family is of encoder-decoders.
        translated: other keys that `read` looks at, beside those of `defaults`.
        only: keys that change nothing at these values, and are refused at others.
        harmless: keys that change nothing that this family computes, whatever they are.
        defaults: what transformers takes for a key that is absent.
        read: the spec's other fields from the config (typed access, and the head's kind), without the family; they
            go before those of `keys`.
        write: the other config keys from a spec; what they cannot say is noticed by reading them again.
        rules: how tensors correspond, for a spec.
        aliases: theirs -> theirs: second names of tied tensors, which may be there and must then be equal. Where
            nothing is tied and an alias is a tensor of its own, the other name is the one that is not needed.
            They may depend on the spec.
        renamed: ends of names in old files -> today's.
        stand_in: what transformers takes where a tensor is absent: another one, or zeros (None).
        prefix: what the model's own tensors begin with, and do not where the head is "states" or "embed".
        unused: beginnings (up to a dot) or ends of names of tensors that may be in a file and are not needed.
        heads: beginnings of names of tensors of heads, not needed when another head is asked for.
        constants: tensors that transformers insists on and that say nothing: name -> value for a spec.
        pairing: of rotary positions, in their files.
    """

    family: str
    architectures: Mapping[str, str]
    keys: FieldMap
    read: Callable[[ConfigReader, str], dict[str, Any]]
    write: Callable[[ModelSpec], dict[str, Any]]
    rules: Callable[[ModelSpec], Sequence[Rule]]
    encoder_keys: FieldMap | None = None
    translated: Sequence[str] = ()
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
        if classes not in [[name] for name in self.architectures]:
            raise ConfigError(
                f"config.json: architectures {classes} is not one of model_type {self.family!r}"
                f"{did_you_mean(str(classes), self.architectures)}; known are {', '.join(self.architectures)}"
            )
        given = ConfigReader(config, self.defaults)
        sizes = checked_sizes(read_fields(given, self.keys))
        fields = {**sizes, **self.read(given, self.architectures[classes[0]])}
        checked_sizes({"head_dim": fields["width"] // fields["heads"], **fields})
        if self.encoder_keys is None:
            return ModelSpec.of(self.family, **fields)
        encoder = checked_sizes(read_fields(given, self.encoder_keys))
        return ModelSpec.of_pair(self.family, encoder=encoder, **fields)

    def config(self, spec: ModelSpec) -> dict[str, Any] | None:
        """The config of a spec of this family; None where its head has no class here, or where it is one stack and the
        family has two, or the other way round."""
        kinds = {kind: name for name, kind in reversed(list(self.architectures.items()))}
        if spec.head.task not in kinds or (spec.encoder is None) != (self.encoder_keys is None):
            return None
        said: dict[str, Any] = {"architectures": [kinds[spec.head.task]], "model_type": self.family}
        said |= write_fields(spec, self.keys)
        if spec.encoder is not None and self.encoder_keys is not None:
            said |= {"is_encoder_decoder": True, **write_fields(spec.encoder, self.encoder_keys)}
        return {**said, **self.write(spec)}

    def _check_keys(self, config: Mapping[str, Any]) -> None:
        pair = self.encoder_keys is not None
        only = {"is_encoder_decoder": (pair, None), "pruned_heads": ({}, None), **self.only}
        read = (*names(self.keys), *names(self.encoder_keys or {}), *self.defaults, *self.translated)
        for key, value in config.items():
            if key in only:
                if value not in only[key]:
                    raise ConfigError(
                        f'config.json: "{key}" is {value!r}, which headway does not have for model_type '
                        f"{self.family}; accepted is {' or '.join(map(repr, only[key]))}"
                    )
            elif key not in (*read, *self.harmless, *ALWAYS, *HARMLESS):
                hint = did_you_mean(key, [*read, *only, *self.harmless, *HARMLESS])
                raise ConfigError(
                    f'config.json: unknown key "{key}"{hint} for model_type {self.family}; remove it if it does '
                    "not change what the model computes"
                )
