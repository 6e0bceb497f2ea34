"""Names on disk that have changed: what earlier formats wrote, in today's terms.

    format   written by   what has changed since
    1        0.1.0        kinds Linear and LinearAttention, now LinearScaling and LinearAttentionSpec;
                          tensors self_attn.turns.drift, now self_attn.rotary.frequency_offset

The format is in the key "headway" of a config.json of that model_type. The optimizer's file of a training
checkpoint has the names of parameters, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError

FORMAT = 2
"""What is written."""
RENAMED_KINDS: Mapping[str, str] = {"Linear": "LinearScaling", "LinearAttention": "LinearAttentionSpec"}
"""Values of "kind" in format 1, and what they are now."""
RENAMED_TENSORS: Mapping[str, str] = {".self_attn.turns.drift": ".self_attn.rotary.frequency_offset"}
"""The ends of parameters' names in format 1, and what they are now."""


def upgraded_spec(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a spec in the key "headway" of any format, as today's, without the format. Raises ConfigError for a
    format that is unknown."""
    fields = {name: value for name, value in facts.items() if name != "format"}
    match facts.get("format"):
        case int(version) if version == FORMAT:
            return fields
        case 1:
            return {name: _renamed_kinds(value) for name, value in fields.items()}
        case version:
            raise ConfigError(
                f"config.json: headway.format is {version!r}; this version of headway reads 1 and {FORMAT}"
            )


def _renamed_kinds(value: Any) -> Any:
    if isinstance(value, list):
        return [_renamed_kinds(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    new = {key: _renamed_kinds(item) for key, item in value.items()}
    kind = new.get("kind")
    return {**new, "kind": RENAMED_KINDS[kind]} if isinstance(kind, str) and kind in RENAMED_KINDS else new


def parameter_name(name: str, renamed: Mapping[str, str] = RENAMED_TENSORS) -> str:
    """A parameter's name in an old file, by default of format 1, as it is now; `renamed` are the ends that differ."""
    for old, new in renamed.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
