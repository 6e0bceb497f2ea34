"""The families that are not of LLaMA's form, as they lie in the Hugging Face folder: data, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from headway.checkpoints.layouts.base import Layout
from headway.checkpoints.layouts.bert import BERT

LAYOUTS: Mapping[str, Layout] = MappingProxyType({layout.family: layout for layout in (BERT,)})

__all__ = ["LAYOUTS", "Layout"]
