"""The families that are not of LLaMA's form, as they lie in the Hugging Face folder: data, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from headway.checkpoints.layouts.base import Layout
from headway.checkpoints.layouts.bert import BERT
from headway.checkpoints.layouts.falcon import FALCON
from headway.checkpoints.layouts.gpt2 import GPT2
from headway.checkpoints.layouts.gpt_bigcode import GPT_BIGCODE
from headway.checkpoints.layouts.longformer import LONGFORMER
from headway.checkpoints.layouts.starcoder2 import STARCODER2

_ALL = (
    BERT,
    LONGFORMER,
    GPT2,
    GPT_BIGCODE,
    FALCON,
    STARCODER2,
)
LAYOUTS: Mapping[str, Layout] = MappingProxyType({layout.family: layout for layout in _ALL})

__all__ = ["LAYOUTS", "Layout"]
