"""Names on disk that have changed: what earlier formats of config.json's key "headway" wrote, read as today's.

    format   written by   what has changed since
    1        0.1.0        self_attn.turns.drift, now self_attn.rotary.frequency_offset

The optimizer's file of a training checkpoint has the names of parameters, too.
"""

from __future__ import annotations

from collections.abc import Mapping

FORMAT = 2
"""What is written."""
FORMATS = (1, 2)
"""What is read."""
RENAMED_TENSORS: Mapping[str, str] = {".self_attn.turns.drift": ".self_attn.rotary.frequency_offset"}
"""The ends of parameters' names in format 1, and what they are now."""


def parameter_name(name: str) -> str:
    """A parameter's name of any format as it is now."""
    for old, new in RENAMED_TENSORS.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
